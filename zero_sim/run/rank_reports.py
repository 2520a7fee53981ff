"""What each process says of its rank, and all of it together as the result of one case."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from zero_sim.backends import Ending
from zero_sim.errors import EnvironmentProblem
from zero_sim.findings.records import CaseResult, Finding
from zero_sim.judge.conclude import Account, conclude
from zero_sim.judge.seen import Seen, merge_seen
from zero_sim.scenario.spec import Scenario

FailureKind = Literal["system", "user", "machine", "judge"]
"""Whom a failure is charged to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """What one rank raised."""

    kind: FailureKind
    message: str
    detail: str
    """A traceback."""
    time: float
    """In seconds, by that machine's clock: what was raised first is the likeliest cause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What one process says of a case."""

    rank: int
    seen: Sequence[Seen]
    """Of each group of each segment that it came to, in order."""
    accuracy: float | None = None
    said: Sequence[str] = ()
    """What the system has to say of the run."""
    failure: Failure | None = None

    def as_dict(self) -> dict[str, Any]:
        """Everything but evidence, ready for JSON."""
        return {
            "rank": self.rank,
            "seen": [seen.as_dict() for seen in self.seen],
            "accuracy": self.accuracy,
            "said": list(self.said),
            "failure": None if self.failure is None else dataclasses.asdict(self.failure),
        }

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Report:
        """What `as_dict` gave."""
        failure = told["failure"]
        return cls(
            rank=told["rank"],
            seen=[Seen.from_dict(each) for each in told["seen"]],
            accuracy=told["accuracy"],
            said=told["said"],
            failure=None if failure is None else Failure(**failure),
        )


def merge(
    scenario: Scenario, reports: Sequence[Report], *, notes: Sequence[str], lost: Sequence[Finding]
) -> CaseResult:
    """The result of a case that ran on real processes.

    Args:
        scenario: The case.
        reports: What the ranks say; of some of them, if others were lost.
        notes: What the backend has to say.
        lost: What is known of the others; each a finding.

    Raises:
        EnvironmentProblem: A process lacked something that the case needs.
    """
    raised = sorted(
        ((report.rank, report.failure) for report in reports if report.failure is not None),
        key=lambda pair: pair[1].time,
    )
    for _, failure in raised:
        if failure.kind == "machine":
            raise EnvironmentProblem(failure.message)
    account = Account(
        seen=_merge_all(reports),
        # A rank that is lost takes the others with it, in one way or another.
        failures=(*lost, *(_finding(rank, each) for rank, each in raised if each.kind == "system")),
        accuracy=next((each.accuracy for each in reports if each.accuracy is not None), None),
        said=next((each.said for each in reports if each.said), ()),
        notes=notes,
    )
    for rank, failure in raised:
        if failure.kind == "user" and not lost and not any(seen.findings for seen in account.seen):
            return CaseResult(id=scenario.name, verdict="error", seconds=0.0, error=failure.message)
        if failure.kind == "judge" and not account.findings():
            return _not_judged(scenario, f"rank {rank}: {failure.message}", failure.detail)
    return conclude(scenario, account)


def _merge_all(reports: Sequence[Report]) -> list[Seen]:
    """What all saw of each group and segment; a rank that failed did not come to all of them."""
    count = max((len(report.seen) for report in reports), default=0)
    return [
        merge_seen([report.seen[index] for report in reports if index < len(report.seen)])
        for index in range(count)
    ]


def _finding(rank: int, failure: Failure) -> Finding:
    head, _, rest = failure.message.partition("\n")
    return Finding(
        check="world.rank-failed",
        rank=rank,
        message=f"rank {rank} raised {head}",
        detail="\n".join(part for part in (rest, failure.detail) if part),
    )


def _not_judged(scenario: Scenario, error: str, detail: str) -> CaseResult:
    finding = Finding(
        check="internal.judge",
        message="the judge, the reference or the workload raised an error that it did not "
        "foresee, so nothing is said about the system; please report it",
        detail=detail,
    )
    return CaseResult(
        id=scenario.name, verdict="error", seconds=0.0, error=error, findings=(finding,)
    )


def merge_endings(
    scenario: Scenario, endings: Sequence[Ending], *, notes: Sequence[str], stall_seconds: float
) -> CaseResult:
    """The result of a case that workers ran, some of which may be lost.

    Args:
        scenario: The case.
        endings: How each worker's part ended.
        notes: As for `merge`.
        stall_seconds: After how long without a sign of life workers were given up.

    Raises:
        EnvironmentProblem: As `merge`.
    """
    for ending in endings:
        if ending.how == "raised":
            error = f"rank {ending.rank}: {ending.error}"
            return _not_judged(scenario, error, ending.detail)
    reports = [Report.from_dict(ending.result) for ending in endings if ending.how == "done"]
    lost = tuple(_lost(endings, stall_seconds=stall_seconds))
    return merge(scenario, reports, notes=notes, lost=lost)


def _lost(endings: Sequence[Ending], *, stall_seconds: float) -> Iterator[Finding]:
    stacks = {ending.rank: ending.detail for ending in endings if ending.how == "hung"}
    died = [ending for ending in endings if ending.how == "died"]
    gave_up = any(ending.gave_up for ending in endings)
    for ending in died:
        yield Finding(
            check="world.rank-died",
            rank=ending.rank,
            message=f"rank {ending.rank}: {ending.error}",
            detail=where(stacks),
        )
    if stacks and not died and not gave_up:
        yield hung(stacks, stall_seconds=stall_seconds)


def hung(stacks: Mapping[int, str], *, stall_seconds: float) -> Finding:
    """The finding for processes that do not get on.

    Args:
        stacks: Where each was, by rank.
        stall_seconds: How long they were waited for.
    """
    return Finding(
        check="world.hung",
        message=f"{len(stacks)} rank{'s' if len(stacks) > 1 else ''} gave no sign of life for "
        f"{stall_seconds:g} s",
        detail=where(stacks),
    )


def where(stacks: Mapping[int, str]) -> str:
    """Where ranks were when they were given up, rank by rank."""
    lines = []
    for rank, stack in sorted(stacks.items()):
        lines.append(f"rank {rank} was at:")
        lines.extend(f"  {line}" for line in stack.splitlines())
    return "\n".join(lines)
