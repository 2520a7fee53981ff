"""Cases on simulated ranks, which are threads of this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from zero_sim.backends.worlds import WorldPool
from zero_sim.cost.declared_costs import (
    StepCalls,
    check_bytes,
    check_control,
    check_in_flight,
    check_overlapping,
    check_reported_calls,
    reported_calls,
)
from zero_sim.cost.overlap import check_overlap
from zero_sim.cost.relations import check_relations, why_unrelated
from zero_sim.cost.volume import check_volume
from zero_sim.findings.records import Finding
from zero_sim.host.device import use_in_thread
from zero_sim.judge.harness import RankTime
from zero_sim.judge.trajectory import Trajectories
from zero_sim.run.contexts import View
from zero_sim.run.dp_cp_groups import check_crossing
from zero_sim.run.program import GroupContext, Segment, build_program, folder_for, segments_of
from zero_sim.run.rank_local import RankLocalState, rank_local_state
from zero_sim.run.reports import CaseRun
from zero_sim.run.running_case import RunningCase
from zero_sim.scenario.checks import Check
from zero_sim.scenario.spec import Scenario
from zero_sim.sim import (
    ContractViolation,
    DataRace,
    Deadlock,
    EventLog,
    FaultRecord,
    InFlightRace,
    RankFailed,
    RankStalled,
    Replay,
    WorldFailure,
)
from zero_sim.targets import Target, capabilities_of, find_target


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """Backend with simulated ranks."""

    worlds: WorldPool
    target: Target | None = None
    """The system under test; None for the scenario's registered target."""
    turns: Sequence[Sequence[int]] = ()
    """Turns to repeat from an earlier run, one sequence per world."""
    device: str = "cpu"
    own: RankLocalState | None = None
    """Preparations for ranks, instead of those for the target's declared state."""
    trajectories: Trajectories | None = None
    """Steps that references computed in earlier cases. This run adds its own."""
    explainer: str = ""
    """Class that explains differences; see `JudgedGroup`."""
    read_step: int | None = None
    """Step in which to record the params that forwards read; None for none."""

    def run(self, scenario: Scenario) -> CaseRun:
        """Run a case."""
        running = RunningCase(device=self.device)
        ranks = _AllRanks(self)
        kept = ExitStack()

        def find() -> Target:
            target = self.target or find_target(scenario.system.target)
            ranks.own = self.own or rank_local_state(target, ranks_max=threads_max)
            if ranks.own is not None:
                # Keep it until the case ends, because a reload runs a second world.
                kept.enter_context(ranks.own.installed())
            return target

        # Restored below, because the caller's process may do other work.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with kept, folder_for(scenario) as folder:
                segments = tuple(
                    replace(segment, read_step=self.read_step)
                    for segment in segments_of(scenario, folder=Path(folder))
                )
                threads_max = max(segment.scenario.world.size for segment in segments)
                running.run(segments, ranks, find=find, rank_threads=threads_max)
            if ranks.own is not None:
                running.outcome.notes.extend(ranks.own.notes())
            report = running.report(with_buffer_maps=True)
        finally:
            torch.set_num_threads(threads)
        return CaseRun(reports=[report], notes=ranks.notes, logs=ranks.logs)


@dataclass(slots=True)
class _AllRanks:
    """A case's ranks, in one simulated world after the other."""

    backend: Simulated
    logs: list[EventLog] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    own: RankLocalState | None = None
    """Preparations for ranks, if the target declares rank-local state."""

    def run(self, segment: Segment, index: int, running: RunningCase, *, target: Target) -> None:
        """Run a segment, as in `Ranks`. If a world fails but no rank raised, this is a finding."""
        world = self.backend.worlds.world_for(segment.scenario)
        log = EventLog()
        view = View(
            # Findings contain their position in the log.
            calls_made=log.collectives.__len__,
            trajectories=self.backend.trajectories,
            explainer=self.backend.explainer,
        )
        contexts = running.build_contexts(segment, target=target, view=view)
        replay = None
        if index < len(self.backend.turns):
            # Not strict, because another version may issue other calls. A note reports where the
            # runs diverge.
            replay = Replay(self.backend.turns[index], strict=False)
            world.configure(schedule=replay)
        program = build_program(
            segment,
            contexts=contexts,
            target=target,
            outcome=running.outcome,
            rank_time=RankTime(world.pause_clock),
            clock=log.moments.__len__,
        )

        def on_device(rank: int) -> None:
            # Each thread has its own current device.
            use_in_thread(running.device)
            with nullcontext() if self.own is None else self.own.in_rank():
                program(rank)

        try:
            if self.own is not None:
                world.keep_apart(self.own.own)
            world.run(on_device, log=log)
        except RankFailed:
            raise
        except WorldFailure as failed:
            running.found.append(_world_finding(failed, log.faults))
            return
        finally:
            # The pool keeps the world for other targets.
            world.keep_apart(None)
            self.logs.append(log)
            if replay is not None and replay.diverged_at is not None:
                self.notes.append(
                    f"world {len(self.logs)} left the recorded turns at turn {replay.diverged_at} "
                    f"of {len(replay.turns)}"
                )
        running.found.extend(
            check_crossing(log.collectives, [context.dp_cp_group for context in contexts])
        )
        # Costs are meaningless after a wrong value or a planned fault, which may change later
        # calls.
        if not running.is_wrong() and not segment.scenario.faults:
            for context in contexts:
                running.found.extend(_check_costs(context, log, target=target))

    def is_wrong_anywhere(self, index: int, is_wrong_here: bool) -> bool:
        """Return `is_wrong_here`, because there is no other process."""
        return is_wrong_here


def _check_costs(context: GroupContext, log: EventLog, *, target: Target) -> Iterator[Finding]:
    """Check a group's costs against declared costs, and against relations valid in any system."""
    judge, scenario = context.judge, context.dp_cp_group.scenario
    group = judge.group
    # Without notes, a rank has not reached its first step.
    if len(judge.notes) < len(group.world_ranks):
        return
    costs = judge.notes[0].costs
    sizes = {rank: notes.sizes for rank, notes in judge.notes.items()}
    group.unobserved.update(costs.undeclared())
    if why := why_unrelated(group.scenario):
        group.unobserved.add(f"relations of calls, with {why}")
    step_calls = StepCalls(
        log=log, windows=judge.book.windows, sizes=sizes, scenario=group.scenario
    )
    volume = next(_check_volume(context, step_calls, target=target), None)
    if volume is not None:
        yield volume
    # If the calls are wrong, so is their timing: report only the calls.
    if volume is None and costs.calls_in_flight is not None:
        yield from check_overlapping(step_calls, costs.calls_in_flight)
    if volume is not None or costs.in_flight is None:
        return
    # A target's own form first; below, the closed form of our system.
    if costs.in_flight != "textbook":
        yield from check_in_flight(step_calls, costs.in_flight)
        return
    yield from check_overlap(
        log,
        {rank: each.hook_trace for rank, each in judge.notes.items() if each.hook_trace},
        world_ranks=group.world_ranks,
        sizes=sizes,
        scenario=scenario,
    )


def _check_volume(
    context: GroupContext, step_calls: StepCalls, *, target: Target
) -> Iterator[Finding]:
    """Yield findings about a group's calls: declared costs first, then relations."""
    judge, scenario = context.judge, context.dp_cp_group.scenario
    group = judge.group
    costs, records = judge.notes[0].costs, step_calls.log.collectives
    if costs.calls == "textbook":
        yield from check_volume(
            records, judge.book.windows, sizes=step_calls.sizes, scenario=scenario
        )
    elif costs.calls is not None:
        if reported_calls(group.ownership.places, held=group.ownership.param_names):
            has = "system.bucket_elems" in capabilities_of(target).follows
            yield from check_reported_calls(
                step_calls, group.ownership.places, has_bucket_elems=has, costs=costs
            )
        else:
            group.unobserved.add("calls of told buckets")
    if costs.volume == "textbook":
        yield from check_bytes(replace(step_calls, scenario=scenario), None)
    elif costs.volume is not None:
        yield from check_bytes(step_calls, costs.volume)
    if costs.control_calls is not None:
        yield from check_control(step_calls, costs.control_calls)
    yield from check_relations(
        records,
        judge.book.windows,
        held={rank: each.held_sizes for rank, each in judge.notes.items()},
        scenario=group.scenario,
        costs=costs,
    )


def _world_finding(failed: WorldFailure, faults: Sequence[FaultRecord]) -> Finding:
    """Return the finding for a world that failed although no rank raised."""
    head, _, rest = str(failed).partition("\n")
    check, rank = Check.WORLD_FAILED, None
    match failed:
        case Deadlock():
            # The plan stalls a rank, so the others are expected to deadlock.
            planned = any(record.kind == "stall" and record.fired for record in faults)
            check = Check.WORLD_STALLED_BY_PLAN if planned else Check.WORLD_DEADLOCK
        case ContractViolation():
            check, rank = Check.WORLD_CONTRACT, failed.rank
        case DataRace():
            check, rank = Check.WORLD_RACE, failed.rank
        case RankStalled():
            check, rank = Check.WORLD_STALLED, failed.rank
        case InFlightRace():
            check, rank = Check.WORLD_IN_FLIGHT_RACE, failed.rank
    return Finding(check=check, message=head, rank=rank, detail=rest)
