"""What the judge says: verdicts, findings and results. Records only; every report reads these."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from zero_sim.sim import EventLog

Verdict = Literal["pass", "fail", "inconclusive", "error"]
"""`pass`: all that is owed was observed and holds. `fail`: the system under test is wrong.
`inconclusive`: nothing was wrong, but the case could not have shown it. `error`: it was not
judged."""


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
    """Stable id of the check: `equality.master`, `invariant.ownership`, `world.deadlock`."""
    message: str
    """What is wrong, in one sentence."""
    step: int | None = None
    """Optimizer step, counted from 0."""
    phase: str | None = None
    """Part of the step, such as `forward` or `gather`."""
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
    `one-sum` or `modelled-order`; see `zero_sim.verify.owed`."""
    collectives: int = 0
    """Collectives that the world recorded."""
    log_digest: str = ""
    """Digest of the event log: equal for two runs of one seed."""
    error: str = ""
    """Why the case was not judged; for verdict `error`."""
    logs: tuple[EventLog, ...] = field(default=(), compare=False, repr=False)
    """The event log of each world that the case ran in; kept where it failed, or on demand."""

    def as_dict(self) -> dict[str, object]:
        """Everything but the event logs, ready for JSON."""
        return {**_plain(self), "findings": [finding.as_dict() for finding in self.findings]}


def _plain(record: Finding | CaseResult) -> dict[str, object]:
    names = [column.name for column in dataclasses.fields(record)]
    values = {name: getattr(record, name) for name in names if name not in ("evidence", "logs")}
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in values.items()
    }
