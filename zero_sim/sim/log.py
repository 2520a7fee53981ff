"""Every event of a run as a record: the only thing that reports read."""

from __future__ import annotations

import hashlib
from os.path import basename
from typing import Literal, NamedTuple


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
    output_elems: int = 0
    """Elements that the rank ends up with, counted as `elems` is."""

    @property
    def bytes(self) -> int:
        """Size of the contribution in bytes."""
        return self.elems * self.elem_bytes

    @property
    def site(self) -> str:
        """Where it was called, `file:line`."""
        return f"{self.file}:{self.line}"


class Moment(NamedTuple):
    """One thing that happened to one rank's call."""

    tick: int
    """The log's clock: grows from event to event."""
    rank: int
    what: Literal["issue", "read", "perform", "write", "wait", "land"]
    """From the call (`issue`) to the end of the wait for it (`land`)."""
    record: int
    """Index of the call in `EventLog.collectives`."""


class EventLog:
    """The events of one run, in the one order in which they happened."""

    def __init__(self) -> None:
        self.collectives: list[CollectiveRecord] = []
        self.turns: list[int] = []
        """The ranks that got the baton, in order."""
        self.moments: list[Moment] = []
        """What happened to the calls besides their issue, where the world keeps track of it."""
        self.refused: int | None = None
        """Index of the call that did not fit the others' and so ended the run."""

    def of_rank(self, rank: int) -> list[CollectiveRecord]:
        """The calls of one rank, in its program's order."""
        return [record for record in self.collectives if record.rank == rank]

    def digest(self) -> str:
        """A hash of every event; the folder of a call site is left out, so that it travels."""
        state = hashlib.sha256()
        for record in self.collectives:
            state.update(repr(tuple(record._replace(file=basename(record.file)))).encode())
        state.update(repr(self.turns).encode())
        return state.hexdigest()
