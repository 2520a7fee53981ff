"""Judges of case after case on real ranks: own workers, or the processes of a launched job."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, Self

from zero_sim.backends import torchrun as launched
from zero_sim.backends.real import RealRank
from zero_sim.backends.team import Ending, Teams
from zero_sim.backends.transports import find_transport
from zero_sim.backends.worlds import WorldPool
from zero_sim.findings.records import CaseResult, Finding
from zero_sim.run.grads_told import Point, ToldAt, judge_as_told
from zero_sim.run.layout_pair import record_layout
from zero_sim.run.probing import OrderDrift
from zero_sim.run.program import folder_for
from zero_sim.run.real import judge_rank, processes_of
from zero_sim.run.reports import CaseRun, Failure, Report
from zero_sim.run.runner import judge_case
from zero_sim.run.setup import OWN_ORDERS, Setup, judge_drifted
from zero_sim.run.sgd_twin import with_twin
from zero_sim.run.simulated import Simulated
from zero_sim.scenario.checks import Check
from zero_sim.scenario.decode import adapter
from zero_sim.scenario.spec import Scenario
from zero_sim.targets import import_target, refusals
from zero_sim.targets.numerics import GradsTold
from zero_sim.targets.recorded import Record

_LATE = "torch._dynamo"
"""What torch's optimizers import when the first one is made, which takes seconds."""

PRELOAD = ("zero_sim.backends.worker", judge_rank.__module__, _LATE)
"""What workers import before they are forked."""

Job = Callable[[Mapping[str, Any], RealRank], Any]
"""What a process runs, a function of a module; takes and gives what can be written as JSON."""


class Processes(Protocol):
    """Processes that run a job together, each as one rank."""

    @property
    def notes(self) -> Sequence[str]:
        """What was fixed about the backend, in words."""
        ...

    def run(
        self, job: Job, payload: Mapping[str, Any], *, needed: int, stall_seconds: float
    ) -> Sequence[Ending]:
        """Run a job on every process; how it ended on each, in rank order.

        Args:
            job: The job.
            payload: What it takes, the same for all; the number of `processes` is added to it.
            needed: How many are needed at least.
            stall_seconds: How long they may give no sign of life.
        """
        ...

    def __exit__(self, *exception: object) -> None:
        """End them, or wait until all are through."""
        ...


class RealJudge:
    """Judges one case after another on real ranks; to be closed.

    Args:
        setup: What carries the collectives.
        processes: What the ranks are.
        target: `module:name` of the system under test; empty for the one that each case names.
        explainer: As for `JudgedGroup`.
    """

    def __init__(
        self, setup: Setup, processes: Processes, *, target: str = "", explainer: str
    ) -> None:
        self.setup = setup
        self._explainer = explainer
        self._processes = processes
        self._target = target
        self._points: defaultdict[str, Point] = defaultdict(list)
        """By name of a target."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._processes.__exit__(*exception)

    def __call__(self, scenario: Scenario) -> CaseResult:
        """Judge a case; a process that dies or hangs costs this case alone.

        Raises:
            EnvironmentProblem: Processes cannot be started, or lack something that the case needs;
                or the case is one that `Setup.why_left_out` names.
        """
        return with_twin(
            self._judge_as_told(scenario),
            scenario,
            judge=self._judge_as_told,
            find=lambda: import_target(self._target or scenario.system.target),
        )

    def _judge_as_told(self, scenario: Scenario) -> CaseResult:
        if not self._target:
            return self._judge(scenario)  # Registered targets declare where they tell gradients.
        return judge_as_told(
            scenario,
            judge=self._judge,
            find=lambda: import_target(self._target),
            known=self._points[self._target],
        )

    def _judge(self, scenario: Scenario, point: GradsTold | None = None) -> CaseResult:
        self.setup.check(scenario)
        started = time.perf_counter()
        record, wrong = self._second_layout(scenario, point)
        if wrong is not None:
            return wrong
        backend = _Backend(run_on_ranks=partial(self._run, point=point or "", record=record))
        try:
            result = judge_case(scenario, backend)
        except OrderDrift as drift:
            result = judge_drifted(
                drift, scenario, self.setup, judge=lambda case: judge_case(case, backend)
            )
        return replace(result, seconds=time.perf_counter() - started)

    def _second_layout(
        self, scenario: Scenario, point: GradsTold | None
    ) -> tuple[Record | None, CaseResult | None]:
        """Run a case in its second layout, if it has one, on simulated ranks: bits are the same."""
        if scenario.pair is None:
            return None, None
        target = import_target(self._target or scenario.system.target)
        if refusals(target, scenario):
            return None, None
        with WorldPool() as worlds:
            backend = Simulated(worlds=worlds)
            return record_layout(
                scenario,
                ToldAt(target, point) if point else target,
                judge=lambda case, each: judge_case(
                    case, replace(backend, target=each), with_digest=False
                ),
            )

    def _run(self, scenario: Scenario, *, point: str, record: Record | None) -> CaseRun:
        stall_seconds = scenario.run.stall_seconds
        with folder_for(scenario) as folder:
            payload = {
                "scenario": adapter().dump_json(scenario).decode(),
                "folder": folder,
                "order": self.setup.order_of(scenario),
                "added_in": self.setup.order_of(scenario) or OWN_ORDERS[self.setup.backend],
                "target": self._target,
                "grads_told": point,
                "explainer": "" if record else self._explainer,
                "layout": None if record is None else record.as_list(),
                "device": self.setup.device,
                "probe": self.setup.relies_on_own(scenario),
            }
            endings = self._processes.run(
                judge_rank, payload, needed=processes_of(scenario), stall_seconds=stall_seconds
            )
        reports = tuple(_reports_of(endings, stall_seconds=stall_seconds))
        for report in reports:
            if report.drifts:
                raise OrderDrift(report.drifts)
        measured = next((report.measured for report in reports if report.measured), ())
        return CaseRun(reports=reports, notes=[*self._notes(scenario), *measured])

    def _notes(self, scenario: Scenario) -> Sequence[str]:
        return [self.setup.note(scenario), *self._processes.notes]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Backend:
    run_on_ranks: Callable[[Scenario], CaseRun]

    def run(self, scenario: Scenario) -> CaseRun:
        """Run a case, as `Backend` says.

        Raises:
            OrderDrift: The case relies on an order in which the backend does not add.
        """
        return self.run_on_ranks(scenario)


def on_workers(setup: Setup, *, target: str = "", explainer: str) -> RealJudge:
    """A judge on worker processes of its own, kept from case to case.

    Args:
        setup: What carries the collectives.
        target: As for `RealJudge`.
        explainer: As for `RealJudge`.

    Raises:
        EnvironmentProblem: This machine has no such backend.
    """
    find_transport(setup.backend).check()
    return RealJudge(setup, _Workers(setup.backend), target=target, explainer=explainer)


def as_launched(setup: Setup, *, target: str = "", explainer: str) -> RealJudge:
    """A judge in each process of a job that torchrun, or something like it, started.

    Every process of the job runs the same cases, and all come to the same results.

    Args:
        setup: What carries the collectives.
        target: As for `RealJudge`.
        explainer: As for `RealJudge`.

    Raises:
        EnvironmentProblem: The machines cannot run the job together; says why.
    """
    processes = _Launched(setup.backend)
    launched_setup = replace(setup, ranks_max=processes.count)
    return RealJudge(launched_setup, processes, target=target, explainer=explainer)


class _Workers:
    """Worker processes of its own."""

    def __init__(self, backend: str) -> None:
        self.notes: Sequence[str] = ()
        self._told: dict[int, Sequence[str]] = {}
        """What workers said is fixed about the backend, by their number."""
        self._teams = Teams(backend=backend, preload=PRELOAD)

    def __exit__(self, *exception: object) -> None:
        self._teams.close()

    def run(
        self, job: Job, payload: Mapping[str, Any], *, needed: int, stall_seconds: float
    ) -> Sequence[Ending]:
        def on_all(job: Job, payload: Mapping[str, Any]) -> Sequence[Ending]:
            return self._teams.run(
                _name_of(job),
                {**payload, "processes": needed},
                size=needed,
                timeout_seconds=stall_seconds,
            )

        if needed not in self._told:
            # Only who has taken a device knows which one it is.
            self._told[needed] = on_all(launched.be_there, {})[0].result or ()
        self.notes = self._told[needed]
        return on_all(job, payload)


class _Launched:
    """All processes of the job that this process is one of."""

    def __init__(self, backend: str) -> None:
        self._job = launched.LaunchedJob(backend, preload=PRELOAD)
        self.count, self.notes = self._job.count, self._job.notes

    def __exit__(self, *exception: object) -> None:
        self._job.close(in_order=exception[0] is None)

    def run(
        self, job: Job, payload: Mapping[str, Any], *, needed: int, stall_seconds: float
    ) -> Sequence[Ending]:
        return self._job.run(_name_of(job), payload, stall_seconds=stall_seconds)


def _name_of(job: Job) -> str:
    return f"{job.__module__}:{job.__name__}"


def _reports_of(endings: Sequence[Ending], *, stall_seconds: float) -> Iterator[Report]:
    """What each process says; of one that is lost, what is known of it."""
    stacks = {ending.rank: ending.detail for ending in endings if ending.how == "hung"}
    for ending in endings:
        if ending.how == "done":
            yield Report.from_dict(ending.result)
        elif ending.how == "raised":
            failure = Failure(
                kind="judge", message=ending.error, detail=ending.detail, rank=ending.rank
            )
            yield Report(failure=failure)
        elif ending.how == "died":
            died = Finding(
                check=Check.WORLD_RANK_DIED,
                rank=ending.rank,
                message=f"rank {ending.rank}: {ending.error}",
                detail=_where(stacks),
            )
            yield Report(found=[died])
    # Whoever ended otherwise is what the others wait for.
    if stacks and not any(end.how in ("died", "raised") or end.gave_up for end in endings):
        yield Report(found=[_hung(stacks, stall_seconds=stall_seconds)])


def _hung(stacks: Mapping[int, str], *, stall_seconds: float) -> Finding:
    """The finding for processes that do not get on."""
    return Finding(
        check=Check.WORLD_HUNG,
        message=f"{len(stacks)} rank{'s' if len(stacks) > 1 else ''} gave no sign of life for "
        f"{stall_seconds:g} s",
        detail=_where(stacks),
    )


def _where(stacks: Mapping[int, str]) -> str:
    """Where ranks were when they were given up, rank by rank."""
    lines = []
    for rank, stack in sorted(stacks.items()):
        lines.append(f"rank {rank} was at:")
        lines.extend(f"  {line}" for line in stack.splitlines())
    return "\n".join(lines)
