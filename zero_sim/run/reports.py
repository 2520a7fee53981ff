"""Reports of the processes that ran a case, and the result that all of them together give.

Of a simulated world one process reports for all ranks; of real ranks each process for its own.
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
"""Whom a failure is charged to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """What a rank raised, or who judges it."""

    kind: FailureKind
    message: str
    detail: str = ""
    """A traceback."""
    rank: int | None = None
    """The rank that raised it; None for what built their judges."""
    time: float = 0.0
    """In seconds, by that machine's clock: what was raised first is the likeliest cause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What one process says of a case."""

    judged: Sequence[JudgeReport] = ()
    """Of each group of each segment that it came to, in order."""
    found: Sequence[Finding] = ()
    """What is wrong besides, the first cause first: a world that ended, calls that cost too much,
    a process that is lost."""
    failure: Failure | None = None
    drifts: Sequence[str] = ()
    """Where the backend adds otherwise than the case relies on; then it was not judged."""
    measured: Sequence[str] = ()
    """How communicators were seen to add."""
    accuracy: float | None = None
    other_version: str = ""
    """The installed version of the judged library, in words; empty for the judged one."""
    said: Sequence[str] = ()
    """What the system has to say of the run."""
    buffer_maps: Sequence[BufferMap | None] = ()
    """For each of `judged`, the buffer of its first finding; of a simulated world alone."""

    def as_dict(self) -> dict[str, Any]:
        """Return everything but evidence and buffer maps, ready for JSON."""
        # Not in pydantic's mode for JSON, which makes None of what is infinite.
        data = _adapter().dump_python(self, exclude=_LOCAL)
        for judged in data["judged"]:
            judged["unobserved"] = sorted(judged["unobserved"])
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """Return the record that `as_dict` was called on."""
        return _adapter().validate_python(data)


_LOCAL: Any = {
    "judged": {"__all__": {"findings": {"__all__": {"evidence"}}}},
    "found": {"__all__": {"evidence"}},
    "buffer_maps": True,
}
"""Fields that stay in their process, as pydantic names them."""


@cache
def _adapter() -> TypeAdapter[Report]:
    # Here, because a case on simulated ranks needs no pydantic.
    from pydantic import TypeAdapter

    return TypeAdapter(Report)


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseRun:
    """What a backend brings back of a case."""

    reports: Sequence[Report]
    """Of its processes, in rank order."""
    notes: Sequence[str] = ()
    """What the backend has to say."""
    logs: Sequence[EventLog] = ()
    """Of each simulated world."""


def result_of(scenario: Scenario, ran: CaseRun, *, with_digest: bool = True) -> CaseResult:
    """The result of a case; it says nothing of its time.

    Args:
        scenario: The case that runs.
        ran: What came of it.
        with_digest: Whether it has the digest of the event logs.

    Raises:
        EnvironmentProblem: A process lacked something that the case needs.
    """
    raised = sorted(
        (report.failure for report in ran.reports if report.failure is not None),
        key=lambda failure: failure.time,
    )
    for failure in raised:
        if failure.kind == "machine":
            raise EnvironmentProblem(failure.message)
    judged = _judged_by_all(ran.reports)
    found = [finding for report in ran.reports for finding in report.found]
    said = [*next((report.said for report in ran.reports if report.said), ())]
    for failure in raised:
        if failure.kind == "system":
            continue
        # What other ranks raise is what becomes of them once one of them gave up.
        if not found and not any(each.findings for each in judged):
            return _not_judged(scenario, failure)
        # What was found before stands, and may be what led to this.
        said.append(f"{failure.message}, after what was found")
    observations = Observations(
        judged=judged,
        # A rank that is lost takes the others with it, in one way or another.
        failures=(*found, *(_rank_failed(each) for each in raised if each.kind == "system")),
        faults=[record for log in ran.logs for record in log.faults],
        accuracy=next((each.accuracy for each in ran.reports if each.accuracy is not None), None),
        said=said,
        notes=ran.notes,
        collectives=sum(len(log.collectives) - len(log.harness) for log in ran.logs),
        log_digest="+".join(log.digest() for log in ran.logs) if with_digest else "",
        buffer_maps=[buffer_map for report in ran.reports for buffer_map in report.buffer_maps],
    )
    other_version = next((r.other_version for r in ran.reports if r.other_version), "")
    return _with_version(reach_verdict(scenario, observations), other_version)


def _with_version(result: CaseResult, other_version: str) -> CaseResult:
    """Return the result of a failed case, its first finding with the library's version."""
    if result.verdict != "fail" or not other_version:
        return result
    first, *others = result.findings
    detail = "\n".join(filter(None, [first.detail, other_version]))
    return replace(result, findings=(replace(first, detail=detail), *others))


def _judged_by_all(reports: Sequence[Report]) -> list[JudgeReport]:
    """What all saw of each group and segment; a rank that failed did not come to all of them."""
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
        message="the judge, the reference or the workload raised an error that it did not "
        "foresee, so nothing is said about the system; please report it",
        detail=failure.detail,
    )
    return not_judged(scenario.name, failure.message, finding)
