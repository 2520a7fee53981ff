"""Reports from the processes that ran a case, and their common result.

In a simulated world, one process reports for all ranks. With real ranks, each process reports for
its own rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from zero_sim.errors import EnvironmentProblem
from zero_sim.findings.records import BufferMap, CaseResult, Finding, not_judged
from zero_sim.judge.judge_report import JudgeReport, merge_judge_reports
from zero_sim.judge.verdict import Observations, reach_verdict
from zero_sim.scenario.checks import Check
from zero_sim.scenario.spec import Scenario
from zero_sim.sim import EventLog

if TYPE_CHECKING:
    from pydantic import TypeAdapter

FailureKind = Literal["system", "user", "machine", "judge"]
"""Party that is charged with a failure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """An error that a rank or its judge raised."""

    kind: FailureKind
    message: str
    detail: str = ""
    """Traceback."""
    rank: int | None = None
    """Rank that raised the error; None if building the judges raised it."""
    time: float = 0.0
    """Time in seconds by the machine's clock. The first error probably caused the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A process's report about a case."""

    judged: Sequence[JudgeReport] = ()
    """Reports from each group's judge in each segment that started, in order."""
    found: Sequence[Finding] = ()
    """Other findings, causes first: a failed world, excess calls, a lost process."""
    failure: Failure | None = None
    drifts: Sequence[str] = ()
    """Differences from the order that the case relies on. If there are any, the case was not
    judged."""
    measured: Sequence[str] = ()
    """Communicators' measured orders, in words."""
    accuracy: float | None = None
    other_version: str = ""
    """Installed version of the system's library, in words; empty for the supported version."""
    system_notes: Sequence[str] = ()
    """The system's notes about the run."""
    buffer_maps: Sequence[BufferMap | None] = ()
    """Buffer maps for first findings, by entry in `judged`; only in a simulated world."""

    def as_dict(self) -> dict[str, Any]:
        """Return everything except evidence and buffer maps, ready for JSON."""
        # Not in pydantic's JSON mode, which replaces infinities by None.
        data = _adapter().dump_python(self, exclude=_LOCAL)
        for judged in data["judged"]:
            # JSON has no sets.
            judged["unobserved"] = sorted(judged["unobserved"])
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """Return the report from a result of `as_dict`."""
        return _adapter().validate_python(data)


_LOCAL: Any = {
    "judged": {"__all__": {"findings": {"__all__": {"evidence"}}}},
    "found": {"__all__": {"evidence"}},
    "buffer_maps": True,
}
"""Fields that stay in their process, in pydantic's notation."""


@cache
def _adapter() -> TypeAdapter[Report]:
    # Imported here, because simulated ranks need no pydantic.
    from pydantic import TypeAdapter

    return TypeAdapter(Report)


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseRun:
    """A case's outcome on a backend."""

    reports: Sequence[Report]
    """Reports by process, in rank order."""
    notes: Sequence[str] = ()
    """The backend's notes."""
    logs: Sequence[EventLog] = ()
    """Event logs of simulated worlds."""


def result_of(scenario: Scenario, ran: CaseRun, *, with_digest: bool = True) -> CaseResult:
    """Return a case's result, without its time, and with the event logs' digest if wanted.

    Raises:
        EnvironmentProblem: A process lacked something that the case needs.
    """
    raised = sorted(
        (report.failure for report in ran.reports if report.failure is not None),
        key=lambda failure: failure.time,
    )
    for failure in raised:
        # Not about the system: the command reports the missing thing.
        if failure.kind == "machine":
            raise EnvironmentProblem(failure.message)
    judged = _judged_by_all(ran.reports)
    found = [finding for report in ran.reports for finding in report.found]
    # From the first process with notes, because others would repeat them.
    system_notes = [
        *next((report.system_notes for report in ran.reports if report.system_notes), ())
    ]
    for failure in raised:
        # A system's errors become findings below.
        if failure.kind == "system":
            continue
        # Without findings, this failure is the cause: other ranks fail after a rank gives up.
        if not found and not any(each.findings for each in judged):
            return _not_judged(scenario, failure)
        # Earlier findings stand, because they may have led to this failure.
        system_notes.append(f"{failure.message}, after the findings")
    observations = Observations(
        judged=judged,
        # Lost ranks come first, because other ranks fail after them.
        failures=(*found, *(_rank_failed(each) for each in raised if each.kind == "system")),
        faults=[record for log in ran.logs for record in log.faults],
        accuracy=next((each.accuracy for each in ran.reports if each.accuracy is not None), None),
        system_notes=system_notes,
        notes=ran.notes,
        collectives=sum(len(log.collectives) - len(log.harness) for log in ran.logs),
        # A log per world; a case with a reload has two.
        log_digest="+".join(log.digest() for log in ran.logs) if with_digest else "",
        buffer_maps=[buffer_map for report in ran.reports for buffer_map in report.buffer_maps],
    )
    other_version = next((r.other_version for r in ran.reports if r.other_version), "")
    return _with_version(reach_verdict(scenario, observations), other_version)


def _with_version(result: CaseResult, other_version: str) -> CaseResult:
    """Return the result. If it failed, add the library's version to the first finding."""
    if result.verdict != "fail" or not other_version:
        return result
    first, *others = result.findings
    detail = "\n".join(filter(None, [first.detail, other_version]))
    return replace(result, findings=(replace(first, detail=detail), *others))


def _judged_by_all(reports: Sequence[Report]) -> list[JudgeReport]:
    """Merge the reports of each group and segment. A failed rank may lack the last of them."""
    # A simulated world has a single report.
    if len(reports) == 1:
        return list(reports[0].judged)
    count = max((len(report.judged) for report in reports), default=0)
    return [
        merge_judge_reports(
            [report.judged[index] for report in reports if index < len(report.judged)]
        )
        for index in range(count)
    ]


def _rank_failed(failure: Failure) -> Finding:
    # Only the first line, because findings have short messages.
    head, _, rest = failure.message.partition("\n")
    return Finding(
        check=Check.WORLD_RANK_FAILED,
        rank=failure.rank,
        message=f"rank {failure.rank} raised {head}",
        detail="\n".join(part for part in (rest, failure.detail) if part),
    )


def _not_judged(scenario: Scenario, failure: Failure) -> CaseResult:
    if failure.kind == "user":
        return not_judged(scenario.name, failure.message)
    finding = Finding(
        check=Check.INTERNAL_JUDGE,
        rank=failure.rank,
        message="the judge, the reference or the workload raised an unexpected error, so the "
        "system was not judged; please report it",
        detail=failure.detail,
    )
    return not_judged(scenario.name, failure.message, finding)
