"""Scenario in, verdict out: runs one case on a world and judges it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from zero_sim.errors import EnvironmentProblem, UsageError
from zero_sim.launch import WorldPool
from zero_sim.reference import Reference
from zero_sim.scenario.spec import Scenario
from zero_sim.sim import ContractViolation, Deadlock, RankFailed, RankStalled, WorldFailure
from zero_sim.targets import Target, find_target
from zero_sim.verify.cells import Cell, cells_of, check_crossing
from zero_sim.verify.judge import Judge
from zero_sim.verify.owed import Row, in_words
from zero_sim.verify.program import Outcome, Seat, Segment, build_program, segments_of
from zero_sim.verify.records import CaseResult, Finding, Verdict
from zero_sim.workloads import EXACT_MODELS, build_workload


def run_case(
    scenario: Scenario, *, pool: WorldPool | None = None, target: Target | None = None
) -> CaseResult:
    """Run one case and compare all state with the reference after every step.

    Args:
        scenario: A validated case.
        pool: Worlds to reuse; without one, a world is made for this case and closed after it.
        target: The system under test; without one, the registered target that the scenario names.

    Returns:
        The verdict with its findings. A system that raises or hangs is a finding, not an exception.

    Raises:
        EnvironmentProblem: This machine lacks something that the case needs.
    """
    started = time.perf_counter()
    own_pool: AbstractContextManager[WorldPool] = WorldPool() if pool is None else nullcontext(pool)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with own_pool as worlds:
            return _run(scenario, worlds, target, started)
    except UsageError as error:
        seconds = time.perf_counter() - started
        return CaseResult(id=scenario.name, verdict="error", seconds=seconds, error=str(error))
    finally:
        torch.set_num_threads(threads)


@dataclass(slots=True)
class _Trial:
    """A case while it runs: what was seen so far."""

    judges: list[Judge] = field(default_factory=list)
    references: dict[int, Reference] = field(default_factory=dict)
    """By number of the cell; they live on when a checkpoint moves the case to another world."""
    outcome: Outcome = field(default_factory=Outcome)
    failures: list[Finding] = field(default_factory=list)
    collectives: int = 0
    log_digests: list[str] = field(default_factory=list)

    def has_started(self) -> bool:
        """Whether all engines of the first world were built: a refusal after that is a failure."""
        return all(judge.has_started for judge in self.judges)

    def findings(self) -> tuple[Finding, ...]:
        """Everything that is wrong, the earliest first."""
        judged = [finding for judge in self.judges for finding in judge.findings()]
        return (*judged, *self.failures)


def _run(
    scenario: Scenario, worlds: WorldPool, target: Target | None, started: float
) -> CaseResult:
    target = target or find_target(scenario.system.target)
    trial = _Trial()
    needs_folder = scenario.reload is not None
    with TemporaryDirectory(prefix="zero-sim-") if needs_folder else nullcontext("") as folder:
        for segment in segments_of(scenario, folder=Path(folder)):
            try:
                _run_segment(segment, trial, worlds=worlds, target=target)
            except RankFailed as failed:
                if isinstance(failed.error, EnvironmentProblem):
                    raise failed.error from failed
                refused = isinstance(failed.error, UsageError) and segment.load is None
                if refused and not trial.has_started():
                    raise failed.error from failed
                trial.failures.append(_world_finding(failed))
            except WorldFailure as failed:
                trial.failures.append(_world_finding(failed))
            if trial.findings():
                break
    found = trial.findings()
    if not found:
        found = tuple(_check_accuracy(scenario, trial.outcome.accuracy))
    # A run that went wrong has said nothing yet about how much a pass would have meant.
    doubts = [] if found else _doubts(scenario, trial.judges)
    verdict: Verdict = "fail" if found else "inconclusive" if doubts else "pass"
    accuracy = trial.outcome.accuracy
    notes = [] if accuracy is None else [f"held-out accuracy {accuracy:.4f}"]
    owed = sum((judge.owed for judge in trial.judges), start=Counter[Row]())
    if scenario.model.name in EXACT_MODELS:
        notes.append(in_words(owed))
    return CaseResult(
        id=scenario.name,
        verdict=verdict,
        seconds=time.perf_counter() - started,
        findings=found + tuple(doubts),
        notes=(*notes, *trial.outcome.notes),
        owed={str(row): count for row, count in sorted(owed.items())},
        compared_elems=sum(judge.compared_elems for judge in trial.judges),
        collectives=trial.collectives,
        log_digest="+".join(trial.log_digests),
    )


def _run_segment(segment: Segment, trial: _Trial, *, worlds: WorldPool, target: Target) -> None:
    """Run some consecutive steps in one world; what the ranks raise comes through."""
    seats = [
        _take_seat(segment, trial, index=index, cell=cell)
        for index, cell in enumerate(cells_of(segment.scenario))
    ]
    trial.judges.extend(seat.judge for seat in seats)
    world = worlds.world_for(segment.scenario)
    program = build_program(segment, seats=seats, target=target, outcome=trial.outcome)
    try:
        world.run(program)
    finally:
        trial.collectives += len(world.log.collectives)
        trial.log_digests.append(world.log.digest())
    crossing = check_crossing(world.log.collectives, [seat.cell for seat in seats])
    trial.failures.extend(crossing)


def _take_seat(segment: Segment, trial: _Trial, *, index: int, cell: Cell) -> Seat:
    workload = build_workload(cell.scenario)
    reference = trial.references.get(index)
    if reference is None:
        reference = trial.references[index] = Reference(cell.scenario, workload=workload)
    else:
        reference.continue_as(cell.scenario)
    judge = Judge(
        cell.scenario,
        reference=reference,
        first_step=segment.start,
        world_ranks=cell.ranks,
        order_seed=segment.scenario.run.seed,
    )
    return Seat(cell=cell, workload=workload, judge=judge)


def _world_finding(failed: WorldFailure) -> Finding:
    """The finding for a world that ended before its programs did."""
    head, _, rest = str(failed).partition("\n")
    check, rank = "world.failed", None
    match failed:
        case RankFailed():
            check, rank = "world.rank-failed", failed.rank
        case Deadlock():
            check = "world.deadlock"
        case ContractViolation():
            check, rank = "world.contract", failed.rank
        case RankStalled():
            check, rank = "world.stalled", failed.rank
    return Finding(check=check, message=head, rank=rank, detail=rest)


def _check_accuracy(scenario: Scenario, reached: float | None) -> list[Finding]:
    wanted = scenario.expect.accuracy_min
    if wanted is None or (reached is not None and reached >= wanted):
        return []
    return [
        Finding(
            check="expect.accuracy",
            message=f"held-out accuracy after the last step: expected at least {wanted}, "
            f"got {reached}",
            step=scenario.run.steps - 1,
        )
    ]


def _doubts(scenario: Scenario, judges: Sequence[Judge]) -> list[Finding]:
    """Why equality would mean little, though nothing is wrong."""
    doubts = []
    nonzero_fraction = max(judge.nonzero_fraction_max for judge in judges)
    if all(judge.same_data for judge in judges) and scenario.data.ranks == "distinct":
        doubts.append(
            Finding(
                check="guard.same-data",
                message="all ranks saw the same data in every step, which hides most bugs of a "
                'reduction; feed distinct data, or say data.ranks = "same" if that is the point',
            )
        )
    if nonzero_fraction < scenario.expect.nonzero_min:
        doubts.append(
            Finding(
                check="guard.zero-gradients",
                message=f"at most {nonzero_fraction:.0%} of the gradient elements were "
                f"nonzero in any step, expected at least {scenario.expect.nonzero_min:.0%}: "
                "equal zeros prove nothing",
            )
        )
    owed = sum((judge.owed for judge in judges), start=Counter[Row]())
    depending = owed.total() - owed["order-free"]
    if scenario.model.name in EXACT_MODELS and depending:
        doubts.append(
            Finding(
                check="guard.not-order-free",
                message=f"{depending} of {owed.total()} elements of reduced gradients depend on "
                "the order of addition, though this model is there to have none: fewer ranks, "
                "rows or micro-batches, or a division after the sum, keep it within its budget",
            )
        )
    if not any(judge.has_stepped for judge in judges):
        doubts.append(
            Finding(
                check="guard.nothing-stepped",
                message="every step was skipped or had gradients that are not finite, so that no "
                "update was compared; take more steps, or plant the overflow in one of several",
            )
        )
    doubts.extend(
        Finding(
            check="guard.norm-not-certified",
            step=judge.uncertified_step,
            message="the norm lies so close to the middle of two fp32 values that its rounding "
            "depends on the order of the sum; nothing clipped by it is owed. Try another seed",
        )
        for judge in judges
        if judge.uncertified_step is not None
    )
    return doubts
