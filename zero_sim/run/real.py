"""Jobs for real processes, each of which runs and judges one rank.

One process has a reference that replays all ranks, and sends digests of each step. As long as the
digests match, the other processes need not compute their references. A reference only needs the
facts that engines report before the first step. All exchanges use a store, so judging needs no
process group and no collective of the system.
"""

from __future__ import annotations

import contextlib
import gc
import time
import traceback
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_sim.backends.real import RealRank
from zero_sim.backends.side_channel import RankGone, SideChannel
from zero_sim.judge.facts import Facts
from zero_sim.judge.harness import JudgeFailed, RankTime, untimed
from zero_sim.judge.judged_group import JudgedGroup
from zero_sim.judge.step_digests import StepDigests, digests_of
from zero_sim.reference import ReferenceStep
from zero_sim.run.contexts import View
from zero_sim.run.probing import OrderDrift, measure_orders
from zero_sim.run.program import Segment, build_program, segments_of
from zero_sim.run.rank_local import as_in_new_process
from zero_sim.run.report_point import WithReportPoint
from zero_sim.run.running_case import RunningCase
from zero_sim.scenario.decode import adapter
from zero_sim.scenario.spec import Scenario
from zero_sim.sim import RankFailed
from zero_sim.targets import Target, import_target
from zero_sim.targets.recorded import Record, Replayed

REFERENCE_RANK = 0
"""Rank whose process computes steps for all."""
_BEGIN_SECONDS = 1.0
"""Longest wait for a step's beginning; less than other ranks wait for a lost rank."""
_LOOK_SECONDS = 0.001
"""Time between two polls; short, because all ranks begin a step at about the same time."""


class WiredSteps:
    """Digests of steps that one process computes and sends through the store; see `SharedSteps`.

    No process depends on them: a process that receives nothing in time computes the steps itself.

    Args:
        channel: This process's side channel.
        stall_seconds: Longest time that the harness may take for a step, in seconds.
    """

    def __init__(self, channel: SideChannel, *, stall_seconds: float) -> None:
        self._channel = channel
        self._stall_seconds = stall_seconds
        self.are_digests = channel.rank != REFERENCE_RANK
        self._sends = not self.are_digests
        """False if the other processes compute their own steps."""

    def find(self, step: int, *, placed: Hashable = None) -> Sequence[StepDigests] | None:
        """Return a step's digests; None if none were received."""
        if not self.are_digests:
            return None
        # Poll, because a store's wait prints to stderr at its timeout.
        begin_by = time.monotonic() + _BEGIN_SECONDS
        while not self._channel.has_sent(REFERENCE_RANK, about=f"owing {step}"):
            if time.monotonic() > begin_by:
                return None
            time.sleep(_LOOK_SECONDS)
        try:
            # The step has begun, so wait as long as a step may take.
            sent = self._channel.receive(
                REFERENCE_RANK, about=f"owed {step}", seconds=self._stall_seconds
            )
        except (RankGone, TimeoutError):
            return None
        return None if sent is None else [StepDigests(**each) for each in sent]

    def begin(self, step: int) -> None:
        """Send that a step has begun."""
        if self._sends:
            self._channel.send({}, about=f"owing {step}")

    def keep(
        self,
        taken: Sequence[ReferenceStep],
        *,
        groups: Sequence[JudgedGroup],
        placed: Hashable = None,
    ) -> None:
        """Send a step's digests. If they cannot describe it, let the others compute the rest."""
        if not self._sends:
            return
        # A digest is None for a step with unusual results.
        digests = [digests_of(each, group=group) for each, group in zip(taken, groups, strict=True)]
        sent = [each.as_dict() for each in digests if each is not None]
        if len(sent) == len(groups):
            self._send(taken[0].step, sent)
        else:
            self.stop(taken[0].step)

    def stop(self, step: int) -> None:
        """Let the others compute their own steps, from this step on."""
        if self._sends:
            # Receivers first wait for a step's beginning.
            self.begin(step)
            self._send(step, None)
            self._sends = False

    def _send(self, step: int, steps: Sequence[dict[str, Any]] | None) -> None:
        self._channel.send(steps, about=f"owed {step}")

    def close(self, steps: int) -> None:
        """Withdraw all messages in a case, so that no process waits for further steps."""
        for step in range(steps):
            # After the first withdrawn step, the others compute all later steps themselves.
            if self._channel.withdraw([f"owing {step}", f"owed {step}"]):
                return


def processes_of(scenario: Scenario) -> int:
    """Return the number of processes that a case needs: the size of its largest world."""
    return max(part.scenario.world.size for part in segments_of(scenario, folder=Path()))


def judge_rank(payload: Mapping[str, Any], real_rank: RealRank) -> dict[str, Any]:
    """Run a case as one rank, and judge this rank.

    Args:
        payload: Items by key:

            - `scenario`: the case, as JSON
            - `folder`: folder for checkpoints, the same in all processes
            - `processes`: number of processes
            - `order`: order in which ranks fold data, or null for the backend's own
            - `added_in`: the resulting order
            - `target`: `module:name` of the system under test, or empty for the scenario's
            - `reported_grads`: point inferred for the target, or empty
            - `layout`: `Record` of a second layout, as JSON, or null
            - `explainer`: `module:name` of a class that explains differences, or empty
            - `device`: device of the ranks, `cpu` or `cuda`
            - `probe`: true if the case relies on the backend's own order
        real_rank: This process.

    Returns:
        A `Report`, as JSON.
    """
    # Payloads are JSON, because data from other machines must not be unpickled.
    scenario = adapter().validate_json(payload["scenario"])
    segments = tuple(segments_of(scenario, folder=Path(payload["folder"])))
    wired = WiredSteps(real_rank.channel, stall_seconds=scenario.run.stall_seconds)
    ranks = _OwnRank(
        real_rank=real_rank,
        processes=payload["processes"],
        order=payload["order"],
        probe=payload["probe"],
        wired=wired,
        explainer=payload["explainer"],
    )
    running = RunningCase(device=payload["device"], added_in=payload["added_in"])

    def find() -> Target:
        target = import_target(payload["target"] or scenario.system.target)
        point, layout = payload["reported_grads"], payload.get("layout")
        target = WithReportPoint(target, point) if point else target
        return target if layout is None else Replayed(target, Record.from_list(layout))

    try:
        # Another rank gave up, and reports the reason itself.
        with contextlib.suppress(RankGone):
            running.run(segments, ranks, find=find)
    except OrderDrift as drift:
        running.drifts = drift.drifts
    # Report a harness error like a finding, because the other processes wait for a report.
    except Exception as error:  # noqa: BLE001
        running.fail(JudgeFailed(error, traceback.format_exc()), rank=real_rank.rank)
    if running.failure is not None:
        # Other ranks may wait in a collective until this rank's end of the group is destroyed. The
        # system's objects may keep it alive in reference cycles, so collect them.
        real_rank.last_words = f"{running.failure.message}\n{running.failure.detail}"
        gc.collect()
    # Other ranks may still wait for an exchange that this rank no longer reaches.
    abouts = ("joined", "facts", "orders", "wrong", "left")
    real_rank.channel.withdraw(
        [f"{what} {index}" for index in range(len(segments)) for what in abouts]
    )
    if real_rank.rank == REFERENCE_RANK:
        wired.close(scenario.run.steps)
    return running.report().as_dict()


@dataclass(frozen=True, kw_only=True, slots=True)
class _OwnRank:
    """This process's rank."""

    real_rank: RealRank
    processes: int
    """Number of processes. Processes outside a world only follow the exchanges."""
    order: str | None
    """Order in which ranks fold data; None for the backend's own."""
    probe: bool
    """True to measure the backend's own order, because the case relies on it."""
    wired: WiredSteps
    explainer: str
    """Class that explains differences; see `JudgedGroup`."""

    def run(self, segment: Segment, index: int, running: RunningCase, *, target: Target) -> None:
        """Run a segment, as in `Ranks`.

        Raises:
            RankGone: Another rank gave up.
            OrderDrift: The backend adds differently from the order that the case relies on.
        """
        real_rank, scenario = self.real_rank, segment.scenario
        view = View(rank=real_rank.rank, wired=self.wired, explainer=self.explainer)
        # Every process has judges for all groups, because a reference replays all ranks.
        contexts = running.build_contexts(segment, target=target, view=view)

        rank_time = RankTime(self._show_life)

        def share_facts(rank: int, facts: Facts | None) -> None:
            data = None if facts is None else facts.as_dict()
            # Every process needs facts about all ranks before the first step.
            all_facts = self._exchange(data, about=f"facts {index}")
            with rank_time.harness():
                for each in contexts:
                    for place, world_rank in enumerate(each.dp_cp_group.ranks):
                        each.judge.note_facts(place, Facts.from_dict(all_facts[world_rank]))
            if self.probe:
                running.measured = measure_orders(
                    contexts,
                    scenario,
                    real_rank=real_rank,
                    process_count=self.processes,
                    device=running.device,
                    about=f"orders {index}",
                )

        # A process outside this world follows the exchanges and steps, for the next world.
        if real_rank.rank >= scenario.world.size:
            real_rank.leave()
            share_facts(real_rank.rank, None)
            for _ in range(segment.start, segment.stop):
                with rank_time.harness():
                    # The next world may include this process, so its reference takes the steps.
                    contexts[0].judge.step_unseen()
            return
        program = build_program(
            segment,
            contexts=contexts,
            target=target,
            outcome=running.outcome,
            rank_time=rank_time,
            share_facts=share_facts,
        )
        try:
            with real_rank.world(
                scenario.world.size,
                about=str(index),
                order=self.order,
                order_seed=scenario.run.seed,
            ):
                try:
                    # Note missing names once per case, not once per world.
                    notes = running.outcome.notes if index == 0 else None
                    with as_in_new_process(target, ranks_max=self.processes, notes=notes):
                        program(real_rank.rank)
                except (Exception, SystemExit):
                    # Before other ranks raise because this one left.
                    running.raised_at = time.time()
                    raise
        except (RankGone, OrderDrift):
            raise
        # Every error in the system is a finding, even SystemExit.
        except (Exception, SystemExit) as error:
            raise RankFailed(real_rank.rank, error, traceback.format_exc()) from error

    def is_wrong_anywhere(self, index: int, is_wrong_here: bool) -> bool:
        """Return True if any process has a finding, as in `Ranks`."""
        # All processes must stop at the same segment.
        return any(self._exchange(is_wrong_here, about=f"wrong {index}"))

    def _exchange(self, what: Any, *, about: str) -> list[Any]:
        return self.real_rank.channel.exchange(what, size=self.processes, about=about)

    def _show_life(self, pause: bool, **block: Any) -> AbstractContextManager[None]:
        # Harness blocks are signs of life, because their time is not the system's.
        self.real_rank.channel.alive()
        return untimed(pause, **block)
