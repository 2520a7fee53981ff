"""Jobs for real processes: each judges the one rank that it is.

Every process has an oracle of its own, which replays all ranks. It needs nothing of the others but
what they say of their engines before the first step; that goes through a store, so that no process
group and none of the system's collectives take part in judging.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zero_sim.backends import RankGone, RealRank
from zero_sim.backends.probe import Kind, by_calling, by_model, compare, observe
from zero_sim.errors import (
    EnvironmentProblem,
    ProtocolError,
    UntrainableError,
    UsageError,
)
from zero_sim.judge.facts import Facts
from zero_sim.judge.harness import JudgeFailed, ours
from zero_sim.judge.judge import Judge
from zero_sim.judge.known_or_not import AnyReference
from zero_sim.run.program import Outcome, Segment, build_program, segments_of
from zero_sim.run.rank_reports import Failure, Report
from zero_sim.run.seats import take_seats
from zero_sim.scenario.decode import adapter
from zero_sim.scenario.spec import Scenario
from zero_sim.targets import Target, check_asked, import_target

_PROBED: tuple[tuple[Kind, torch.dtype], ...] = (
    ("all_reduce", torch.bfloat16),
    ("reduce_scatter", torch.float32),
)


def payload_of(
    scenario: Scenario,
    *,
    folder: str,
    processes: int,
    order: str | None,
    target: str,
    device: str = "cpu",
) -> dict[str, Any]:
    """What `judge_rank` is to be given.

    Args:
        scenario: The case.
        folder: Where a checkpoint goes, for all processes.
        processes: How many there are; those beyond the world only follow what the others do.
        order: The order to add in, whatever the backend does; None for the backend's own.
        target: `module:name` of the system under test; empty for the one that the scenario names.
        device: Where the ranks compute, `cpu` or `cuda`.
    """
    return {
        "scenario": adapter().dump_json(scenario).decode(),
        "folder": folder,
        "processes": processes,
        "order": order,
        "target": target,
        "device": device,
    }


def processes_of(scenario: Scenario) -> int:
    """How many processes a case needs: the ranks of its largest world."""
    return max(part.scenario.world.size for part in segments_of(scenario, folder=Path()))


@dataclass(kw_only=True, slots=True)
class _Trial:
    """A case while it runs, as one rank sees it."""

    judges: list[Judge] = field(default_factory=list)
    references: dict[int, AnyReference] = field(default_factory=dict)
    """By number of the cell."""
    outcome: Outcome = field(default_factory=Outcome)
    raised_at: float | None = None


def judge_rank(payload: Mapping[str, Any], seat: RealRank) -> dict[str, Any]:
    """Run a case as one rank, and judge that rank.

    Args:
        payload: From `payload_of`.
        seat: This process.

    Returns:
        A `Report`, as JSON.
    """
    scenario = adapter().validate_json(payload["scenario"])
    segments = tuple(segments_of(scenario, folder=Path(payload["folder"])))
    trial = _Trial()
    failure = _run_all(segments, trial, payload=payload, seat=seat)
    if failure is not None:
        # Others may wait in a collective until this rank's half of the group is really gone; what
        # the system built holds on to it in circles, not all of which can be broken.
        seat.last_words = f"{failure.message}\n{failure.detail}"
        gc.collect()
    abouts = ("joined", "facts", "wrong", "left")
    seat.withdraw([f"{what} {index}" for index in range(len(segments)) for what in abouts])
    return Report(
        rank=seat.rank,
        seen=[judge.seen() for judge in trial.judges],
        accuracy=trial.outcome.accuracy,
        said=trial.outcome.notes,
        failure=failure,
    ).as_dict()


def _run_all(
    segments: Sequence[Segment], trial: _Trial, *, payload: Mapping[str, Any], seat: RealRank
) -> Failure | None:
    """Run the segments until something is wrong on any rank; what this one raised, if it did."""
    try:
        scenario = segments[0].scenario
        target = import_target(payload["target"] or scenario.system.target)
        check_asked(target, scenario)
        for index, segment in enumerate(segments):
            _run_segment(segment, index, trial, payload=payload, target=target, seat=seat)
            if index + 1 == len(segments):
                break
            wrong = any(judge.findings() for judge in trial.judges)
            if any(seat.exchange(wrong, size=payload["processes"], about=f"wrong {index}")):
                break
    except RankGone:
        # Whoever gave up says why.
        return None
    # Whatever the system raises is what came of it, also where it means to end its rank.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return _failure(_untrainable(trial) or error, trial)
    return None


def probe_order(payload: Mapping[str, Any], seat: RealRank) -> list[str]:
    """Measure in which order the backend adds, beside the model of that order.

    Args:
        payload: `size`, the number of ranks that take part; `order`, the name of the model;
            `device`, where data lies.
        seat: This process.

    Returns:
        Where the backend drifted from the model, in words; empty where it did not.
    """
    size, order = payload["size"], payload["order"]
    if seat.rank >= size:
        seat.leave()
        return []
    drifts = []
    with seat.world(size, about="probe"):
        assert dist.group.WORLD is not None
        for kind, dtype in _PROBED:
            elems = 5 * size
            with_backend = by_calling(
                kind, group=dist.group.WORLD, elems=elems, dtype=dtype, device=payload["device"]
            )
            with_model = by_model(kind, order=order, rank_count=size, elems=elems, dtype=dtype)
            seen, wanted = (
                observe(reduction, rank_count=size, dtype=dtype)
                for reduction in (with_backend, with_model)
            )
            said = compare(wanted, seen, name=order)
            if said.startswith("drift"):
                drifts.append(f"{kind} of {dtype} over {size} ranks: {said}")
    return drifts


def _run_segment(
    segment: Segment,
    index: int,
    trial: _Trial,
    *,
    payload: Mapping[str, Any],
    target: Target,
    seat: RealRank,
) -> None:
    """Run some consecutive steps, or follow them where this process has no part in them."""
    scenario = segment.scenario
    size, has_part = scenario.world.size, seat.rank < scenario.world.size
    seats = take_seats(
        segment,
        references=trial.references,
        target=target,
        device=payload["device"],
        rank=seat.rank,
    )
    trial.judges.extend(each.judge for each in seats)
    about = f"facts {index}"

    def excused(excuse: bool) -> AbstractContextManager[None]:
        seat.alive()
        return nullcontext()

    def tell(rank: int, facts: Facts | None) -> None:
        said = None if facts is None else facts.as_dict()
        heard = seat.exchange(said, size=payload["processes"], about=about)
        with ours(excused):
            for each in seats:
                for place, world_rank in enumerate(each.cell.ranks):
                    each.judge.hear(place, Facts.from_dict(heard[world_rank]))

    if has_part:
        program = build_program(
            segment,
            seats=seats,
            target=target,
            outcome=trial.outcome,
            excused=excused,
            tell=tell,
        )
        with seat.world(
            size, about=str(index), order=payload["order"], order_seed=scenario.run.seed
        ):
            try:
                program(seat.rank)
            except (Exception, SystemExit):
                # Leaving the world is what makes others raise, too.
                trial.raised_at = time.time()
                raise
        return
    seat.leave()
    tell(seat.rank, None)
    for _ in range(segment.start, segment.stop):
        with ours(excused):
            seats[0].judge.step_unseen()


def _has_started(trial: _Trial) -> bool:
    return bool(trial.judges) and all(judge.has_started for judge in trial.judges)


def _untrainable(trial: _Trial) -> Exception | None:
    """That the reference cannot take the step either in which something was raised here."""
    if not _has_started(trial) or any(judge.findings() for judge in trial.judges):
        return None
    try:
        with ours(lambda excuse: nullcontext()):
            for judge in trial.judges:
                judge.ask_reference()
    except (UntrainableError, JudgeFailed) as error:
        return error
    return None


def _failure(error: BaseException, trial: _Trial) -> Failure:
    """Charge what was raised to whom it belongs: the machine, the user, us, or the system."""
    told = traceback.format_exc()
    kind, message = "system", f"{type(error).__name__}: {error}"
    match error:
        case EnvironmentProblem():
            kind, message = "machine", str(error)
        case JudgeFailed():
            kind, message, told = "judge", str(error), error.traceback_text
        case ProtocolError() | UntrainableError():
            kind, message = "user", str(error)
        case UsageError() if not _has_started(trial):
            kind, message = "user", str(error)
    when = time.time() if trial.raised_at is None else trial.raised_at
    return Failure(kind=kind, message=message, detail=told.rstrip(), time=when)
