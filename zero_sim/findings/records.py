"""Records of verdicts, findings and results. All reports read these."""

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
"""`pass`: everything observed is right; see `Scope`. `fail`: the system under test is wrong.
`inconclusive`: no finding, but the case could not have shown one. `error`: the case was not judged.
"""
Scope = Literal["full", "params-only"]
"""`full`: an averaged gradient or optimizer state was compared. `params-only`: neither was. Most
optimizers hide a wrong factor of the gradient from the params."""


TAKEN = "not declared, so taken: "
"""Prefix of notes on rules that were worked out."""
UNOBSERVED = "not observed, because the target does not report it: "
"""Prefix of the note that lists unobserved items, separated by commas."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Evidence:
    """Compared elements around the first difference."""

    start: int
    """Offset of the first of these elements in the compared tensor, flattened."""
    expected: Tensor  # 1D
    got: Tensor  # 1D


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One violation of a check, with its coordinates; None for those that do not apply."""

    check: str
    """A `Check`; in a bundle of another version possibly an unknown one."""
    message: str
    """The violation, in one sentence."""
    step: int | None = None
    """Optimizer step, counted from 0."""
    phase: str | None = None
    """A `Phase` of the step; for unexpected errors, the exception's type."""
    rank: int | None = None
    param: str | None = None
    """Name of the param in the model."""
    index: tuple[int, ...] | None = None
    """Index within the param's shape."""
    offset_in_param: int | None = None
    """The same element as an offset in the flattened param."""
    flat_offset: int | None = None
    """Offset in the flat buffer, in elements."""
    bucket: int | None = None
    shard: int | None = None
    shard_start: int | None = None
    """First element of the shard in the flat buffer."""
    shard_stop: int | None = None
    """One past the shard's last element."""
    expected: str | None = None
    """Value of the reference, as a hex float. For fp8: before scaling, followed by its byte."""
    got: str | None = None
    """Value of the system, in the same form."""
    expected_value: str | None = None
    """`expected` in decimal."""
    got_value: str | None = None
    """`got` in decimal."""
    ulp: int | None = None
    """Distance of the two in representable numbers."""
    differ_count: int | None = None
    """Number of differing elements, out of `compared_count`."""
    compared_count: int | None = None
    """Number of elements compared."""
    differ_spans: tuple[tuple[int, int], ...] = ()
    """Half-open spans of differing elements in the flattened param, or in the compared tensor if
    there is no param. Only the first ones if there are many."""
    manner: str = ""
    """Manner of the difference, as in `zero_sim.findings.describe`, after the key of the compared
    tensor if there are several. Empty for findings without a comparison of values."""
    call_start: int | None = None
    """Number of calls in the world's log when this step began on the rank."""
    call_stop: int | None = None
    """Number of calls in the world's log when the finding was made."""
    detail: str = ""
    """Further lines: a table, a traceback."""
    # Excluded from equality, because == on tensors gives a tensor.
    evidence: Evidence | None = field(default=None, compare=False, repr=False)
    """The tensors around the first difference, if kept."""

    @property
    def identity(self) -> tuple[str, int | None, int | None, str | None]:
        """Key of equal failures: check, step, rank and param."""
        return self.check, self.step, self.rank, self.param

    def as_dict(self) -> dict[str, object]:
        """Return all fields but the evidence, as JSON values."""
        return _plain(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class MappedBucket:
    """A bucket in a buffer map."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MappedShard:
    """A shard of a bucket, and the ranks that hold it."""

    index: int
    bucket: int
    ranks: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MappedPiece:
    """The part of a param inside one shard."""

    param: str
    start: int
    stop: int
    param_start: int
    """Offset of the first element in the flattened param."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferMap:
    """A flat buffer with a finding, as integers and names.

    Spans are half-open and count elements from the start of the buffer.
    """

    check: str = ""
    """Check of the finding; empty for a buffer without one."""
    buffer: int
    elems: int
    """Length of the buffer, as reported by its owners."""
    start: int
    stop: int
    """The mapped part of the buffer, with `start`: all of it, unless it has too many pieces."""
    buckets: tuple[MappedBucket, ...]
    shards: tuple[MappedShard, ...]
    pieces: tuple[MappedPiece, ...]
    """In buffer order."""
    padding: tuple[tuple[int, int], ...]
    """Elements of no param."""
    unowned: tuple[tuple[int, int], ...]
    """Elements of a param without an owner."""
    differ: tuple[tuple[int, int], ...]
    """Differing elements on any rank; only the first spans if there are many."""
    differ_cut: bool
    """True if there are more."""
    differ_ranks: tuple[int, ...]
    """Ranks with a difference."""

    def as_dict(self) -> dict[str, object]:
        """Return all fields, as JSON values."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseResult:
    """Result of one case."""

    id: str
    verdict: Verdict
    seconds: float
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    """Remarks for the reader, one sentence each."""
    compared_elems: int = 0
    """Elements compared bit for bit, over all steps, ranks and tensors."""
    owed: Mapping[str, int] = field(default_factory=dict)
    """Elements of reduced gradients over all steps, by guarantee: `order-free`, `one-sum`,
    `modelled-order` or `bound`; see `zero_sim.judge.guarantee`."""
    unobserved: tuple[str, ...] = ()
    """Items that the target does not report, so they were not compared."""
    scope: Scope = "full"
    """Coverage of a pass."""
    collectives: int = 0
    """Number of collectives recorded by the world, without those of the judge."""
    log_digest: str = ""
    """Digest of the event log; equal for two runs with one seed."""
    error: str = ""
    """Reason why the case was not judged, for verdict `error`."""
    strip: BufferMap | None = None
    """Buffer map of the first finding that lies in a flat buffer."""
    twin: Scenario | None = field(default=None, compare=False, repr=False)
    """SGD variant in which the findings were made; None for the case itself."""
    logs: tuple[EventLog, ...] = field(default=(), compare=False, repr=False)
    """Event log of each world of the case; kept if it failed, or on request."""

    @property
    def passes_by_params_only(self) -> bool:
        """True if the case passes without an averaged gradient or optimizer state compared."""
        return self.verdict == "pass" and self.scope == "params-only"

    def as_dict(self) -> dict[str, object]:
        """Return all fields but event logs and twin, as JSON values."""
        return {
            **_plain(self),
            "findings": [finding.as_dict() for finding in self.findings],
            "strip": None if self.strip is None else self.strip.as_dict(),
        }


def taken_notes(result: CaseResult) -> tuple[str, ...]:
    """Return notes on rules that were worked out because the target declares none."""
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
    """Return the result of a case whose judging raised an unexpected error.

    Args:
        error: The exception; call this while it is being handled.
        id: Id of the case.
        seconds: Duration.
    """
    # `format_exc` reads the exception that is being handled.
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
