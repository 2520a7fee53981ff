"""Scenario in, verdict out: runs one case on a world and judges it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from zero_sim.backends import WorldPool
from zero_sim.cost.overlap import check_overlap
from zero_sim.cost.volume import check_volume
from zero_sim.errors import (
    EnvironmentProblem,
    ProtocolError,
    UntrainableError,
    UsageError,
)
from zero_sim.findings.records import CaseResult, Finding
from zero_sim.host import supervisor
from zero_sim.judge.conclude import Account, conclude
from zero_sim.judge.harness import JudgeFailed, ours
from zero_sim.judge.judge import Judge
from zero_sim.judge.known_or_not import AnyReference
from zero_sim.run.cells import check_crossing
from zero_sim.run.program import Outcome, Seat, Segment, build_program, segments_of
from zero_sim.run.seats import take_seats
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
from zero_sim.targets import Target, check_asked, find_target


def run_case(
    scenario: Scenario,
    *,
    pool: WorldPool | None = None,
    target: Target | None = None,
    turns: Sequence[Sequence[int]] = (),
    keep_logs: bool = False,
    device: str = "cpu",
) -> CaseResult:
    """Run one case and compare all state with the reference after every step.

    Args:
        scenario: A validated case.
        pool: Worlds to reuse; without one, a world is made for this case and closed after it.
        target: The system under test; without one, the registered target that the scenario names.
        turns: The turns of an earlier run to repeat, one sequence a world; where they cannot be
            taken, the case goes on without them and a note says so.
        keep_logs: Whether the result carries its event logs even if the case does not fail.
        device: Where all ranks and the reference compute, `cpu` or `cuda`.

    Returns:
        The verdict with its findings. A system that raises or hangs is a finding, not an exception;
        a judge, a reference or a workload that raises is an error, and no finding against the
        system.

    Raises:
        EnvironmentProblem: This machine lacks something that the case needs.
    """
    started = time.perf_counter()
    own_pool: AbstractContextManager[WorldPool] = WorldPool() if pool is None else nullcontext(pool)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    supervisor.note(f"case {scenario.name}" if scenario.name else "a case")
    try:
        with own_pool as worlds:
            trial = _Trial(turns=turns, device=device)
            result = _run(scenario, worlds, target, trial)
            seconds = time.perf_counter() - started
            logs = tuple(trial.logs) if keep_logs or result.verdict == "fail" else ()
            return replace(result, seconds=seconds, logs=logs)
    except UsageError as error:
        seconds = time.perf_counter() - started
        return CaseResult(id=scenario.name, verdict="error", seconds=seconds, error=str(error))
    except JudgeFailed as failed:
        seconds = time.perf_counter() - started
        finding = Finding(
            check="internal.judge",
            message="the judge, the reference or the workload raised an error that it did not "
            "foresee, so nothing is said about the system; please report it",
            detail=failed.traceback_text,
        )
        return CaseResult(
            id=scenario.name,
            verdict="error",
            seconds=seconds,
            error=str(failed),
            findings=(finding,),
        )
    finally:
        torch.set_num_threads(threads)
        supervisor.count_case()


@dataclass(slots=True)
class _Trial:
    """A case while it runs: what was seen so far."""

    judges: list[Judge] = field(default_factory=list)
    references: dict[int, AnyReference] = field(default_factory=dict)
    """By number of the cell; they live on when a checkpoint moves the case to another world."""
    outcome: Outcome = field(default_factory=Outcome)
    failures: list[Finding] = field(default_factory=list)
    logs: list[EventLog] = field(default_factory=list)
    device: str = "cpu"
    turns: Sequence[Sequence[int]] = ()
    """Recorded turns to repeat, by world."""
    notes: list[str] = field(default_factory=list)
    faults: list[FaultRecord] = field(default_factory=list)
    """What came of the planned ones."""

    def has_started(self) -> bool:
        """Whether all engines of the first world were built: a refusal after that is a failure."""
        return all(judge.has_started for judge in self.judges)

    def findings(self) -> tuple[Finding, ...]:
        """Everything that is wrong, the earliest first."""
        judged = [finding for judge in self.judges for finding in judge.findings()]
        return (*judged, *self.failures)


def _run(scenario: Scenario, worlds: WorldPool, target: Target | None, trial: _Trial) -> CaseResult:
    target = target or find_target(scenario.system.target)
    check_asked(target, scenario)
    needs_folder = scenario.reload is not None
    with TemporaryDirectory(prefix="zero-sim-") if needs_folder else nullcontext("") as folder:
        for segment in segments_of(scenario, folder=Path(folder)):
            try:
                _run_segment(segment, trial, worlds=worlds, target=target)
            except RankFailed as failed:
                _take_failure(failed, trial, segment=segment)
            except WorldFailure as failed:
                trial.failures.append(_world_finding(failed, trial.faults))
            if trial.findings():
                break
    return conclude(
        scenario,
        Account(
            seen=[judge.seen() for judge in trial.judges],
            failures=trial.failures,
            faults=trial.faults,
            accuracy=trial.outcome.accuracy,
            overlap=trial.outcome.overlap,
            said=trial.outcome.notes,
            notes=trial.notes,
            collectives=sum(len(log.collectives) for log in trial.logs),
            log_digest="+".join(log.digest() for log in trial.logs),
            strips=[judge.strip() for judge in trial.judges],
        ),
    )


def _run_segment(segment: Segment, trial: _Trial, *, worlds: WorldPool, target: Target) -> None:
    """Run some consecutive steps in one world; what the ranks raise comes through."""
    world = worlds.world_for(segment.scenario)
    seats = take_seats(
        segment,
        references=trial.references,
        target=target,
        device=trial.device,
        calls_made=lambda: len(world.log.collectives),
    )
    trial.judges.extend(seat.judge for seat in seats)
    replay = None
    if len(trial.logs) < len(trial.turns):
        replay = Replay(trial.turns[len(trial.logs)], strict=False)
        world.configure(schedule=replay)
    program = build_program(
        segment,
        seats=seats,
        target=target,
        outcome=trial.outcome,
        excused=world.excused,
        clock=lambda: len(world.log.moments),
    )
    try:
        world.run(program)
    finally:
        trial.logs.append(world.log)
        trial.faults.extend(world.log.faults)
        if replay is not None and replay.diverged_at is not None:
            trial.notes.append(
                f"world {len(trial.logs)} left the recorded turns at turn {replay.diverged_at} of "
                f"{len(replay.turns)}"
            )
    crossing = check_crossing(world.log.collectives, [seat.cell for seat in seats])
    trial.failures.extend(crossing)
    # Behind a wrong number the calls are that number's doing, and a planned fault is no call.
    if not trial.findings() and not segment.scenario.faults:
        for seat in seats:
            trial.failures.extend(_check_costs(seat, world.log))


def _check_costs(seat: Seat, log: EventLog) -> Iterator[Finding]:
    judge, scenario = seat.judge, seat.cell.scenario
    if len(judge.sizes) < len(judge.world_ranks):
        return
    volume = list(
        check_volume(log.collectives, judge.windows, sizes=judge.sizes, scenario=scenario)
    )
    yield from volume
    # Calls that are too many or too few are not on time either.
    if not volume:
        yield from check_overlap(
            log,
            judge.paces,
            world_ranks=judge.world_ranks,
            sizes=judge.sizes,
            scenario=scenario,
        )


def _take_failure(failed: RankFailed, trial: _Trial, *, segment: Segment) -> None:
    """Charge what a rank raised to whom it belongs: the machine, the user, us, or the system."""
    if isinstance(failed.error, EnvironmentProblem):
        raise failed.error from failed
    error = failed.error
    if isinstance(error, JudgeFailed | ProtocolError | UntrainableError):
        if not trial.findings():
            raise error from failed
        # What was found before stands, and may be what led to this.
        trial.outcome.notes.append(f"{error}, after what was found")
        return
    if isinstance(error, UsageError) and segment.load is None and not trial.has_started():
        raise error from failed
    if trial.has_started() and not trial.findings() and not segment.scenario.faults:
        _ask_references(trial, segment=segment)
    trial.failures.append(_world_finding(failed, trial.faults))


def _ask_references(trial: _Trial, *, segment: Segment) -> None:
    """Let the references take the step in which a rank failed.

    Raises:
        UntrainableError: They cannot either.
        JudgeFailed: They fail otherwise.
    """
    with ours(lambda excuse: nullcontext()):
        for judge in trial.judges:
            if judge.first_step == segment.start:
                judge.ask_reference()


def _world_finding(failed: WorldFailure, faults: Sequence[FaultRecord]) -> Finding:
    """The finding for a world that ended before its programs did."""
    head, _, rest = str(failed).partition("\n")
    check, rank = "world.failed", None
    match failed:
        case RankFailed():
            check, rank = "world.rank-failed", failed.rank
        case Deadlock():
            planned = any(record.kind == "stall" and record.fired for record in faults)
            check = "world.stalled-by-plan" if planned else "world.deadlock"
        case ContractViolation():
            check, rank = "world.contract", failed.rank
        case DataRace():
            check, rank = "world.race", failed.rank
        case RankStalled():
            check, rank = "world.stalled", failed.rank
        case InFlightRace():
            check, rank = "world.in-flight-race", failed.rank
    return Finding(check=check, message=head, rank=rank, detail=rest)
