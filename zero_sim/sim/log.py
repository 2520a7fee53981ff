"""Every event of a run as a record: the only thing that reports read."""

from __future__ import annotations

import hashlib
from os.path import basename
from typing import NamedTuple


class CollectiveRecord(NamedTuple):
    """One rank's call of one collective (or one send or receive)."""

    rank: int
    kind: str
    """`all_reduce`, `reduce_scatter`, `all_gather`, ... whatever spelling the caller used."""
    group: str
    """Name of the group, `world` for the default one."""
    group_ranks: tuple[int, ...]
    """World ranks of the group's members, in group order."""
    sequence: int
    """Collectives that the rank had issued on this group before; the tag of a send or receive."""
    dtype: str
    elems: int
    """Elements that the rank contributes, or ends up with where it contributes none."""
    elem_bytes: int
    detail: str
    """Reduce operation, root or peer."""
    asynchronous: bool
    file: str
    line: int

    @property
    def bytes(self) -> int:
        """Size of the contribution in bytes."""
        return self.elems * self.elem_bytes

    @property
    def site(self) -> str:
        """Where it was called, `file:line`."""
        return f"{self.file}:{self.line}"


class FaultRecord(NamedTuple):
    """What came of one planned fault."""

    index: int
    """Its place in the plan."""
    kind: str
    rank: int
    fired: bool
    """Whether it happened."""
    when: str
    """The call at which it was due, in words; empty where that never came, and for `slow`."""
    effect: str
    """What it did, or why it did nothing."""
    file: str
    line: int

    @property
    def site(self) -> str:
        """Where that call was made, `file:line`; empty without one."""
        return f"{self.file}:{self.line}" if self.file else ""

    def __str__(self) -> str:
        when = f" {self.when}" if self.when else ""
        site = f", {self.site}" if self.site else ""
        return f"{self.kind} of rank {self.rank}{when}{site}: {self.effect}"


class EventLog:
    """The events of one run, in the one order in which they happened."""

    def __init__(self) -> None:
        self.collectives: list[CollectiveRecord] = []
        self.turns: list[int] = []
        """The ranks that got the baton, in order."""
        self.faults: list[FaultRecord] = []
        """One for each planned fault, in the order in which they happened or could not."""

    def of_rank(self, rank: int) -> list[CollectiveRecord]:
        """The calls of one rank, in its program's order."""
        return [record for record in self.collectives if record.rank == rank]

    def digest(self) -> str:
        """A hash of every event; the folder of a call site is left out, so that it travels."""
        state = hashlib.sha256()
        for record in self.collectives:
            fields = (*record[:-2], basename(record.file), record.line)
            state.update(repr(fields).encode())
        state.update(repr(self.turns).encode())
        for fault in self.faults:
            state.update(repr((*fault[:-2], basename(fault.file), fault.line)).encode())
        return state.hexdigest()
