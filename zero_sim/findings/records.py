"""Records that all reports read: verdicts, findings and case results."""

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
    # Records are decoded by their annotations, in processes that do not import torch.
    Tensor = Any

Verdict = Literal["pass", "fail", "inconclusive", "error"]
"""`pass`: every observed value is right; see `Scope`. `fail`: the system under test is wrong.
`inconclusive`: no finding, but a bug could not have shown. `error`: the case was not judged.
"""
Scope = Literal["full", "params-only"]
"""`full`: an averaged gradient or optimizer state was compared. `params-only`: neither was. This
scope is weaker because most optimizers, such as Adam, cancel a wrong gradient factor."""


TAKEN = "not declared, so taken: "
"""Prefix of notes on rules that zero_sim inferred from the run."""
UNOBSERVED = "not observed, because the target does not report it: "
"""Prefix of the note on unobserved items; a comma-separated list follows."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Evidence:
    """Compared elements around the first difference."""

    start: int
    """Offset of these elements in the flattened tensor."""
    expected: Tensor  # 1D
    got: Tensor  # 1D


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One violation of a check, with its coordinates. Those that do not apply are None."""

    check: str
    """A `Check` id. Bundles of other versions may contain unknown ids."""
    message: str
    """The violation, in one sentence."""
    step: int | None = None
    """Optimizer step, counted from 0."""
    phase: str | None = None
    """A `Phase` of the step, or the exception type of an unexpected error."""
    rank: int | None = None
    param: str | None = None
    """Param name in the model."""
    index: tuple[int, ...] | None = None
    """Index of the first differing element in the param's shape."""
    offset_in_param: int | None = None
    """Offset of this element in the flattened param."""
    flat_offset: int | None = None
    """Offset of this element in the flat buffer."""
    bucket: int | None = None
    shard: int | None = None
    shard_start: int | None = None
    """First element of the shard in the flat buffer."""
    shard_stop: int | None = None
    """One past the shard's last element."""
    expected: str | None = None
    """Reference value as a hex float. For fp8, the unscaled value and its byte."""
    got: str | None = None
    """System value, in the same form."""
    expected_value: str | None = None
    """`expected` in decimal."""
    got_value: str | None = None
    """`got` in decimal."""
    ulp: int | None = None
    """Distance from `expected` to `got` in representable numbers."""
    differ_count: int | None = None
    """Number of differing elements, out of `compared_count`."""
    compared_count: int | None = None
    """Number of compared elements."""
    differ_spans: tuple[tuple[int, int], ...] = ()
    """Half-open spans of differing elements in the flattened param, or in the compared tensor if
    there is no param. At most the first `SPANS_MAX`."""
    manner: str = ""
    """A `zero_sim.findings.describe.Manner`, preceded by the tensor's key if a check compares
    several: `exp_avg sign`. Empty if no values were compared."""
    call_start: int | None = None
    """Length of the world's call log when this rank began the step."""
    call_stop: int | None = None
    """Length of the world's call log when the check failed."""
    detail: str = ""
    """Further lines, such as a table or a traceback."""
    # Excluded from equality, because == on tensors gives a tensor.
    evidence: Evidence | None = field(default=None, compare=False, repr=False)
    """Tensors around the first difference, if kept."""

    @property
    def identity(self) -> tuple[str, int | None, int | None, str | None]:
        """Check, step, rank and param. Findings with equal keys count as the same failure."""
        return self.check, self.step, self.rank, self.param

    def as_dict(self) -> dict[str, object]:
        """Return all fields except the evidence, as JSON values."""
        return _plain(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class MappedBucket:
    """A bucket in a buffer map."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MappedShard:
    """A bucket's shard, and the ranks that hold it."""

    index: int
    bucket: int
    ranks: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MappedPiece:
    """A param's elements inside one shard."""

    param: str
    start: int
    stop: int
    param_start: int
    """Offset of `start` in the flattened param."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferMap:
    """A flat buffer with a finding, as integers and names.

    Spans are half-open and count elements from the start of the buffer.
    """

    check: str = ""
    """The finding's check; empty without a finding."""
    buffer: int
    elems: int
    """Buffer length, as reported by its owners."""
    start: int
    stop: int
    """The map shows [start, stop): the whole buffer, or a window if it has too many pieces."""
    buckets: tuple[MappedBucket, ...]
    shards: tuple[MappedShard, ...]
    pieces: tuple[MappedPiece, ...]
    """In buffer order."""
    padding: tuple[tuple[int, int], ...]
    """Elements that belong to no param."""
    unowned: tuple[tuple[int, int], ...]
    """Param elements without an owner."""
    differ: tuple[tuple[int, int], ...]
    """Elements that differ on any rank; only the first spans if there are many."""
    differ_cut: bool
    """True if `differ` omits spans."""
    differ_ranks: tuple[int, ...]
    """Ranks with a difference."""

    def as_dict(self) -> dict[str, object]:
        """Return all fields as JSON values."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseResult:
    """Result of one case."""

    id: str
    verdict: Verdict
    seconds: float
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    """Remarks for the reader, each a sentence."""
    compared_elems: int = 0
    """Elements compared bit for bit, over all steps, ranks and tensors."""
    guarantees: Mapping[str, int] = field(default_factory=dict)
    """Reduced gradient elements over all steps, by guarantee: `order-free`, `one-sum`,
    `modelled-order` or `bound`; see `zero_sim.judge.guarantee`."""
    unobserved: tuple[str, ...] = ()
    """Items that were not compared because the target does not report them."""
    scope: Scope = "full"
    collectives: int = 0
    """Number of collectives in the world's log; the judge's own are excluded."""
    log_digest: str = ""
    """Event log digest. Two runs with one seed have equal digests."""
    error: str = ""
    """Reason why the case was not judged, if the verdict is `error`."""
    strip: BufferMap | None = None
    """Buffer map of the first finding that lies in a flat buffer."""
    twin: Scenario | None = field(default=None, compare=False, repr=False)
    """SGD twin that has the findings; None if the case itself has them."""
    logs: tuple[EventLog, ...] = field(default=(), compare=False, repr=False)
    """Event log of each world; kept if the case failed, or on request."""

    @property
    def passes_by_params_only(self) -> bool:
        """True for a pass in which no averaged gradient or optimizer state was compared."""
        return self.verdict == "pass" and self.scope == "params-only"

    def as_dict(self) -> dict[str, object]:
        """Return all fields except logs and twin, as JSON values."""
        return {
            **_plain(self),
            "findings": [finding.as_dict() for finding in self.findings],
            "strip": None if self.strip is None else self.strip.as_dict(),
        }


def taken_notes(result: CaseResult) -> tuple[str, ...]:
    """Return notes on inferred rules, which the target does not declare."""
    return tuple(note for note in result.notes if note.startswith(TAKEN))


def not_judged(
    case_id: str, error: str, finding: Finding | None = None, *, seconds: float = 0.0
) -> CaseResult:
    """Return the result of a case that was not judged.

    Args:
        case_id: Id of the case.
        error: Reason, in one sentence.
        finding: Internal error; None if the case was refused.
        seconds: Duration.
    """
    findings = () if finding is None else (finding,)
    return CaseResult(id=case_id, verdict="error", seconds=seconds, error=error, findings=findings)


def unforeseen(error: Exception, *, id: str, seconds: float = 0.0) -> CaseResult:
    """Return the result of a case that raised an unexpected error.

    Args:
        error: The exception. Call this inside its `except` block.
        id: Id of the case.
        seconds: Duration.
    """
    # `format_exc` reads the current exception, not `error`.
    finding = Finding(
        check=Check.INTERNAL_ERROR,
        phase=type(error).__name__,
        message="zero_sim raised an unexpected error; please report it",
        detail=traceback.format_exc(),
    )
    return not_judged(id, f"{type(error).__name__}: {error}", finding, seconds=seconds)


def _plain(record: Finding | CaseResult) -> dict[str, object]:
    # Tensors, logs and scenarios have no JSON form.
    names = [column.name for column in dataclasses.fields(record)]
    values = {
        name: getattr(record, name) for name in names if name not in ("evidence", "logs", "twin")
    }
    # Lists, because JSON has no tuples.
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in values.items()
    }
