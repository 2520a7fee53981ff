"""Judges for cases on real ranks: own workers, or a launched job's processes."""

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
from zero_sim.run.layout_pair import record_layout
from zero_sim.run.probing import OrderDrift
from zero_sim.run.program import folder_for
from zero_sim.run.real import judge_rank, processes_of
from zero_sim.run.report_point import Point, WithReportPoint, judge_at_report_point
from zero_sim.run.reports import CaseRun, Failure, Report
from zero_sim.run.runner import judge_case
from zero_sim.run.setup import OWN_ORDERS, Setup, judge_drifted
from zero_sim.run.sgd_twin import with_twin
from zero_sim.run.simulated import Simulated
from zero_sim.scenario.checks import Check
from zero_sim.scenario.decode import adapter
from zero_sim.scenario.spec import Scenario
from zero_sim.targets import import_target, refusals
from zero_sim.targets.numerics import ReportedGrads
from zero_sim.targets.recorded import Record

_OPTIMIZER_IMPORT = "torch._dynamo"
"""Module that torch imports for the first optimizer, which takes seconds."""

PRELOAD = ("zero_sim.backends.worker", judge_rank.__module__, _OPTIMIZER_IMPORT)
"""Modules that workers import before they are forked."""

Job = Callable[[Mapping[str, Any], RealRank], Any]
"""Module-level function that a process runs. Argument and result are JSON."""


class Processes(Protocol):
    """Processes that run a job together, each as one rank."""

    @property
    def notes(self) -> Sequence[str]:
        """The backend's fixed settings, in words."""
        ...

    def run(
        self, job: Job, payload: Mapping[str, Any], *, needed: int, stall_seconds: float
    ) -> Sequence[Ending]:
        """Run a job on every process; return the endings in rank order.

        Args:
            job: The job.
            payload: Its argument, the same on all processes. `processes`, their number, is added.
            needed: Least number of processes.
            stall_seconds: Longest time without a sign of life from a process.
        """
        ...

    def __exit__(self, *exception: object) -> None:
        """End the processes, or wait until all are done."""
        ...


class RealJudge:
    """Judge for one case at a time on real ranks. Close it after use.

    Args:
        setup: The backend's setup.
        processes: The ranks' processes.
        target: `module:name` of the system under test; empty for each case's own.
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
        """Inferred points by target name."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._processes.__exit__(*exception)

    def __call__(self, scenario: Scenario) -> CaseResult:
        """Judge a case. If a process dies or hangs, only this case is lost.

        Raises:
            EnvironmentProblem: Processes cannot be started, or lack something that the case needs;
                or `Setup.why_left_out` returns a reason.
        """
        return with_twin(
            self._judge_by_point(scenario),
            scenario,
            judge=self._judge_by_point,
            find=lambda: import_target(self._target or scenario.system.target),
        )

    def _judge_by_point(self, scenario: Scenario) -> CaseResult:
        if not self._target:
            return self._judge(scenario)  # Registered targets declare where they report gradients.
        return judge_at_report_point(
            scenario,
            judge=self._judge,
            find=lambda: import_target(self._target),
            known=self._points[self._target],
        )

    def _judge(self, scenario: Scenario, point: ReportedGrads | None = None) -> CaseResult:
        # Check before any process starts.
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
        self, scenario: Scenario, point: ReportedGrads | None
    ) -> tuple[Record | None, CaseResult | None]:
        """Run a case's second layout, if any, on simulated ranks."""
        if scenario.pair is None:
            return None, None
        target = import_target(self._target or scenario.system.target)
        # The case itself will report the refusal.
        if refusals(target, scenario):
            return None, None
        # The second layout's bits do not depend on the backend, so simulated ranks suffice.
        with WorldPool() as worlds:
            backend = Simulated(worlds=worlds)
            return record_layout(
                scenario,
                WithReportPoint(target, point) if point else target,
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
                # Judges always need the order, even if it is the backend's own.
                "added_in": self.setup.order_of(scenario) or OWN_ORDERS[self.setup.backend],
                "target": self._target,
                "reported_grads": point,
                # Explanations replay steps, which a recorded layout does not support.
                "explainer": "" if record else self._explainer,
                "layout": None if record is None else record.as_list(),
                "device": self.setup.device,
                "probe": self.setup.relies_on_own(scenario),
            }
            endings = self._processes.run(
                judge_rank, payload, needed=processes_of(scenario), stall_seconds=stall_seconds
            )
        reports = tuple(_reports_of(endings, stall_seconds=stall_seconds))
        # Raise before the verdict, because a case with drift is judged again by bounds.
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
        """Run a case, as in `Backend`.

        Raises:
            OrderDrift: The backend does not add in the order that the case relies on.
        """
        return self.run_on_ranks(scenario)


def on_workers(setup: Setup, *, target: str = "", explainer: str) -> RealJudge:
    """Return a judge with own worker processes, kept from case to case; see `RealJudge`.

    Raises:
        EnvironmentProblem: This machine has no such backend.
    """
    find_transport(setup.backend).check()
    return RealJudge(setup, _Workers(setup.backend), target=target, explainer=explainer)


def as_launched(setup: Setup, *, target: str = "", explainer: str) -> RealJudge:
    """Return this process's judge in a job of torchrun or another launcher; see `RealJudge`.

    All processes in the job run the same cases and get the same results.

    Raises:
        EnvironmentProblem: The machines cannot run the job together.
    """
    processes = _Launched(setup.backend)
    # The job has as many processes as the launcher started, not `WORKERS_MAX`.
    launched_setup = replace(setup, ranks_max=processes.count)
    return RealJudge(launched_setup, processes, target=target, explainer=explainer)


class _Workers:
    def __init__(self, backend: str) -> None:
        self.notes: Sequence[str] = ()
        self._settings_by_count: dict[int, Sequence[str]] = {}
        """The backend's fixed settings as reported by workers, by number of workers."""
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

        if needed not in self._settings_by_count:
            # From a worker, because only a process with a device knows its name.
            self._settings_by_count[needed] = on_all(launched.be_there, {})[0].result or ()
        self.notes = self._settings_by_count[needed]
        return on_all(job, payload)


class _Launched:
    """The launched job's processes, including this process."""

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
    """Yield the report of each process; for a lost process, a report with its finding."""
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
            # Each dead process gives a finding, with the stacks of ranks that hang because of it.
            died = Finding(
                check=Check.WORLD_RANK_DIED,
                rank=ending.rank,
                message=f"rank {ending.rank}: {ending.error}",
                detail=_where(stacks),
            )
            yield Report(found=[died])
    # If a rank died, raised or gave up, the others hang because of it, so this is no finding.
    if stacks and not any(end.how in ("died", "raised") or end.gave_up for end in endings):
        yield Report(found=[_hung(stacks, stall_seconds=stall_seconds)])


def _hung(stacks: Mapping[int, str], *, stall_seconds: float) -> Finding:
    return Finding(
        check=Check.WORLD_HUNG,
        message=f"{len(stacks)} rank{'s' if len(stacks) > 1 else ''} gave no sign of life for "
        f"{stall_seconds:g} s",
        detail=_where(stacks),
    )


def _where(stacks: Mapping[int, str]) -> str:
    """Return the last stacks of hung ranks, as text."""
    lines = []
    for rank, stack in sorted(stacks.items()):
        lines.append(f"rank {rank} was at:")
        lines.extend(f"  {line}" for line in stack.splitlines())
    return "\n".join(lines)
