"""Scenario in, verdict out: runs one case on a world and judges it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from zero_sim.errors import EnvironmentProblem, UsageError
from zero_sim.launch import WorldPool
from zero_sim.reference import Reference
from zero_sim.scenario.spec import Scenario
from zero_sim.sim import ContractViolation, Deadlock, RankFailed, RankStalled, World, WorldFailure
from zero_sim.targets import Target, find_target
from zero_sim.verify.judge import Judge
from zero_sim.verify.records import CaseResult, Finding, Verdict
from zero_sim.workloads import Workload, build_workload, seed_of


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
        return _result(scenario, started, verdict="error", error=str(error))
    finally:
        torch.set_num_threads(threads)


def _run(
    scenario: Scenario, worlds: WorldPool, target: Target | None, started: float
) -> CaseResult:
    target = target or find_target(scenario.system.target)
    workload = build_workload(scenario)
    judge = Judge(scenario, reference=Reference(scenario, workload=workload))
    world = worlds.world_for(scenario)
    accuracy: list[float | None] = []
    program = _program(scenario, workload, target, judge, accuracy)
    failure: Finding | None = None
    try:
        world.run(program)
    except RankFailed as failed:
        if isinstance(failed.error, EnvironmentProblem):
            raise failed.error from failed
        if isinstance(failed.error, UsageError):
            return _result(scenario, started, verdict="error", error=str(failed.error))
        failure = _world_finding(failed)
    except WorldFailure as failed:
        failure = _world_finding(failed)
    found = judge.findings() + ((failure,) if failure is not None else ())
    found += tuple(_check_accuracy(scenario, accuracy))
    # A run that went wrong has said nothing yet about how much a pass would have meant.
    doubts = [] if found else _doubts(scenario, judge)
    verdict: Verdict = "fail" if found else "inconclusive" if doubts else "pass"
    notes = [f"held-out accuracy {value:.4f}" for value in accuracy if value is not None]
    return _result(
        scenario,
        started,
        verdict=verdict,
        findings=found + tuple(doubts),
        notes=tuple(notes),
        judge=judge,
        world=world,
    )


def _program(
    scenario: Scenario,
    workload: Workload,
    target: Target,
    judge: Judge,
    accuracy: list[float | None],
) -> Callable[[int], None]:
    """What every rank runs: a plain training loop with the judge looking on."""
    micro_batches = scenario.run.micro_batches

    def program(rank: int) -> None:
        group = dist.group.WORLD
        assert group is not None
        engine = target.build(workload.build(), scenario=scenario, group=group)
        judge.built(rank, engine)
        for step in range(scenario.run.steps):
            engine.zero_grad()
            judge.before_backward(rank, step, engine)
            losses: list[Tensor] = []
            for micro in range(micro_batches):
                # torch.manual_seed asks every kind of device first, which takes 100 us.
                torch.default_generator.manual_seed(
                    seed_of(scenario, step=step, rank=rank, micro=micro)
                )
                batch = workload.batch(step=step, rank=rank, micro=micro)
                loss = workload.loss(engine.module, batch)
                engine.backward(loss, last_micro=micro == micro_batches - 1)
                losses.append(loss.detach())
            engine.step()
            judge.observe(rank, step, losses, engine)
        if rank == 0:
            accuracy.append(workload.accuracy(engine.module))

    return program


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


def _check_accuracy(scenario: Scenario, accuracy: list[float | None]) -> list[Finding]:
    wanted = scenario.expect.accuracy_min
    if wanted is None or not accuracy:
        return []
    reached = accuracy[0]
    if reached is not None and reached >= wanted:
        return []
    return [
        Finding(
            check="expect.accuracy",
            message=f"held-out accuracy after the last step: expected at least {wanted}, "
            f"got {reached}",
            step=scenario.run.steps - 1,
        )
    ]


def _doubts(scenario: Scenario, judge: Judge) -> list[Finding]:
    """Why equality would mean little, though nothing is wrong."""
    doubts = []
    if judge.same_data and scenario.data.ranks == "distinct":
        doubts.append(
            Finding(
                check="guard.same-data",
                message="all ranks saw the same data in every step, which hides most bugs of a "
                'reduction; feed distinct data, or say data.ranks = "same" if that is the point',
            )
        )
    if judge.nonzero_fraction_max < scenario.expect.nonzero_min:
        doubts.append(
            Finding(
                check="guard.zero-gradients",
                message=f"at most {judge.nonzero_fraction_max:.0%} of the gradient elements were "
                f"nonzero in any step, expected at least {scenario.expect.nonzero_min:.0%}: "
                "equal zeros prove nothing",
            )
        )
    return doubts


def _result(
    scenario: Scenario,
    started: float,
    *,
    verdict: Verdict,
    findings: tuple[Finding, ...] = (),
    notes: tuple[str, ...] = (),
    error: str = "",
    judge: Judge | None = None,
    world: World | None = None,
) -> CaseResult:
    return CaseResult(
        id=scenario.name,
        verdict=verdict,
        seconds=time.perf_counter() - started,
        findings=findings,
        notes=notes,
        error=error,
        compared_elems=0 if judge is None else judge.compared_elems,
        collectives=0 if world is None else len(world.log.collectives),
        log_digest="" if world is None else world.log.digest(),
    )
