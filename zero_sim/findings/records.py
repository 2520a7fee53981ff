"""Records of the judge: verdicts, findings and results. Every report reads these."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from zero_sim.scenario.checks import Check

if TYPE_CHECKING:
    from torch import Tensor

    from zero_sim.scenario.spec import Scenario
    from zero_sim.sim import EventLog
else:
    # Records are decoded without torch, by their annotations.
    Tensor = Any

Verdict = Literal["pass", "fail", "inconclusive", "error"]
"""`pass`: all that was observed is right; see `Scope`. `fail`: the system under test is wrong.
`inconclusive`: nothing was wrong, but the case could not have shown it. `error`: it was not
judged."""
Scope = Literal["full", "params-only"]
"""`full`: an averaged gradient or optimizer state was compared. `params-only`: neither was, and
most optimizers hide a wrong factor of the gradient from params."""


TAKEN = "not declared, so taken: "
"""Beginning of a note on a rule that was worked out."""
UNOBSERVED = "not observed, since the target does not tell it: "
"""Beginning of a note on what was not observed, separated by commas."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Evidence:
    """What was compared around the first element that differs."""

    start: int
    """Offset of the first of these elements in what was compared, flattened."""
    expected: Tensor  # 1D
    got: Tensor  # 1D


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that the judge saw, with every coordinate that it has; None where it has not."""

    check: str
    """A `Check`; of a bundle that another version wrote, perhaps one of its own."""
    message: str
    """What is wrong, in one sentence."""
    step: int | None = None
    """Optimizer step, counted from 0."""
    phase: str | None = None
    """A `Phase` of the step; of an error that nobody foresaw, its type."""
    rank: int | None = None
    param: str | None = None
    """Name of the param in the model."""
    index: tuple[int, ...] | None = None
    """Index within the param's shape."""
    offset_in_param: int | None = None
    """The same as an offset into the flattened param, in elements."""
    flat_offset: int | None = None
    """Offset in the flat buffer, in elements."""
    bucket: int | None = None
    shard: int | None = None
    shard_start: int | None = None
    """First element of that shard in the flat buffer."""
    shard_stop: int | None = None
    """One past its last element."""
    expected: str | None = None
    """What the reference has, as a hex float; of fp8, before its scale, with its byte behind it."""
    got: str | None = None
    """What the system has, in the same form."""
    expected_value: str | None = None
    """The same in decimal."""
    got_value: str | None = None
    """The same in decimal."""
    ulp: int | None = None
    """Representable numbers between the two."""
    differ_count: int | None = None
    """Elements that differ, of `compared_count`."""
    compared_count: int | None = None
    """Elements compared in this check."""
    differ_spans: tuple[tuple[int, int], ...] = ()
    """Half-open spans of what differs, in elements of the flattened param; where there is no param,
    of what was compared. Only the first ones where there are many."""
    manner: str = ""
    """In which way values differ, one of those in `zero_sim.findings.describe`, behind the key of
    what differs where there are several; empty of what is no comparison of values."""
    call_start: int | None = None
    """Calls that the world had logged when the step of this finding began on its rank."""
    call_stop: int | None = None
    """Calls that the world had logged when it was found."""
    detail: str = ""
    """More lines: a table, a traceback."""
    evidence: Evidence | None = field(default=None, compare=False, repr=False)
    """The tensors themselves, as far as they are kept."""

    @property
    def identity(self) -> tuple[str, int | None, int | None, str | None]:
        """What makes two findings the same failure: check, step, rank and param."""
        return self.check, self.step, self.rank, self.param

    def as_dict(self) -> dict[str, object]:
        """Everything but the evidence, ready for JSON."""
        return _plain(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class MappedBucket:
    """A bucket in the strip."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MappedShard:
    """A shard of a bucket, and who holds it."""

    index: int
    bucket: int
    ranks: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MappedPiece:
    """A part of a param that lies inside one shard."""

    param: str
    start: int
    stop: int
    param_start: int
    """Offset of its first element in the flattened param."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferMap:
    """A flat buffer in which a finding lies: integers and names to draw it from.

    All spans are half-open and count elements from the start of the buffer.
    """

    check: str
    """The check of the finding that it shows."""
    buffer: int
    elems: int
    """Elements of the whole buffer, as far as its owners tell."""
    start: int
    stop: int
    """The part of it that is told of here; the whole, unless there is too much in it."""
    buckets: tuple[MappedBucket, ...]
    shards: tuple[MappedShard, ...]
    pieces: tuple[MappedPiece, ...]
    """In buffer order."""
    padding: tuple[tuple[int, int], ...]
    """What belongs to no param."""
    unowned: tuple[tuple[int, int], ...]
    """What belongs to a param and to no rank."""
    differ: tuple[tuple[int, int], ...]
    """What differs on any rank; only the first spans where there are many."""
    differ_cut: bool
    """Whether there are more than these."""
    differ_ranks: tuple[int, ...]
    """The ranks that see a difference."""

    def as_dict(self) -> dict[str, object]:
        """Everything, ready for JSON."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseResult:
    """What came of one case."""

    id: str
    verdict: Verdict
    seconds: float
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    """What a reader should know beside the verdict, one sentence each."""
    compared_elems: int = 0
    """Elements compared bit for bit, over all steps, ranks and kinds of state."""
    owed: Mapping[str, int] = field(default_factory=dict)
    """Elements of reduced gradients, over all steps, by why their bits are owed: `order-free`,
    `one-sum`, `modelled-order` or `bound`; see `zero_sim.judge.guarantee`."""
    unobserved: tuple[str, ...] = ()
    """What the target does not tell, so that nothing is said of it."""
    scope: Scope = "full"
    """How much a pass covers."""
    collectives: int = 0
    """Collectives that the world recorded, without those that only the judge caused."""
    log_digest: str = ""
    """Digest of the event log: equal for two runs of one seed."""
    error: str = ""
    """Why the case was not judged; for verdict `error`."""
    strip: BufferMap | None = None
    """The flat buffer of the first finding that lies in one."""
    twin: Scenario | None = field(default=None, compare=False, repr=False)
    """The variant with SGD in which the findings were made; None if it is the case itself."""
    logs: tuple[EventLog, ...] = field(default=(), compare=False, repr=False)
    """The event log of each world that the case ran in; kept where it failed, or on demand."""

    @property
    def passes_by_params_only(self) -> bool:
        """True if it passes with neither an averaged gradient nor optimizer state compared."""
        return self.verdict == "pass" and self.scope == "params-only"

    def as_dict(self) -> dict[str, object]:
        """Everything but the event logs and the twin, ready for JSON."""
        return {
            **_plain(self),
            "findings": [finding.as_dict() for finding in self.findings],
            "strip": None if self.strip is None else self.strip.as_dict(),
        }


def taken_notes(result: CaseResult) -> tuple[str, ...]:
    """Notes on rules that were worked out because the target declares none."""
    return tuple(note for note in result.notes if note.startswith(TAKEN))


def not_judged(
    case_id: str, error: str, finding: Finding | None = None, *, seconds: float = 0.0
) -> CaseResult:
    """The result of a case of which nothing can be said.

    Args:
        case_id: Of the case.
        error: Why it was not judged, in one sentence.
        finding: What is wrong with us; None where the case was refused.
        seconds: What it took.
    """
    findings = () if finding is None else (finding,)
    return CaseResult(id=case_id, verdict="error", seconds=seconds, error=error, findings=findings)


def unforeseen(error: Exception, *, id: str, seconds: float = 0.0) -> CaseResult:
    """The result of a case whose judging raised what it should not.

    Args:
        error: What it raised, and what is being handled.
        id: Of the case.
        seconds: What it took.
    """
    finding = Finding(
        check=Check.INTERNAL_ERROR,
        phase=type(error).__name__,
        message="zero_sim raised an error that it did not foresee; please report it",
        detail=traceback.format_exc(),
    )
    return not_judged(id, f"{type(error).__name__}: {error}", finding, seconds=seconds)


def _plain(record: Finding | CaseResult) -> dict[str, object]:
    names = [column.name for column in dataclasses.fields(record)]
    values = {
        name: getattr(record, name) for name in names if name not in ("evidence", "logs", "twin")
    }
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in values.items()
    }
