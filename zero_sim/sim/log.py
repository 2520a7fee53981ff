"""Every event of a run as a record: the only thing that reports read."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from os.path import basename
from typing import Literal, NamedTuple

from zero_sim.sim.call import Call
from zero_sim.sim.callsite import site_of

MomentKind = Literal["issue", "read", "perform", "write", "wait", "land"]

LATEST_CALLS = 3
"""How many of a rank's last calls an error shows."""


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
        """Size of the contribution in bytes, not of what a backend sends.

        Of a `broadcast` or `reduce` the whole tensor on every rank, root or not.
        """
        return self.elems * self.elem_bytes

    @property
    def site(self) -> str:
        """Where it was called, `file:line`, as people read it."""
        return site_of(self.file, self.line)

    @property
    def text(self) -> str:
        """The call in words, with its site."""
        number = f"tag {self.sequence}" if self.kind in ("send", "recv") else f"#{self.sequence}"
        parts = [self.dtype, f"{self.elems} elements"] if self.elem_bytes else []
        if self.detail:
            parts.append(self.detail)
        return f"{self.kind} {number} of group {self.group} ({', '.join(parts)}) at {self.site}"


class Moment(NamedTuple):
    """Something that happened to one rank's side of an operation.

    Under the eager timing reading, performing and writing are one with the last member's issue, and
    only `issue`, `wait` and `land` are noted.
    """

    tick: int
    """How many calls into the world there had been, by all ranks together."""
    rank: int
    what: MomentKind
    """`issue`; `read`, its inputs were taken; `perform`, all members' inputs were combined;
    `write`, its outputs reached the rank's memory; `wait`, its wait began; `land`, it returned."""
    record: int
    """Index into `EventLog.collectives`."""


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
        return site_of(self.file, self.line) if self.file else ""

    def __str__(self) -> str:
        when = f" {self.when}" if self.when else ""
        site = f", {self.site}" if self.site else ""
        return f"{self.kind} of rank {self.rank}{when}{site}: {self.effect}"


class EventLog:
    """The events of one run, in the one order in which they happened."""

    def __init__(self) -> None:
        self.tick = 0
        """Calls into the world so far: the time of `moments`."""
        self.collectives: list[CollectiveRecord] = []
        self.moments: list[Moment] = []
        self.turns: list[int] = []
        """The ranks that got the baton, in order."""
        self.faults: list[FaultRecord] = []
        """One for each planned fault, in the order in which they happened or could not."""
        self.refused: int | None = None
        """Index of the call that did not fit the others' and so ended the run."""
        self.harness: set[int] = set()
        """Indices of calls that a harness made or had the program make, in `World.pause_clock`.
        Exports, counts and timelines omit them; no part of the digest."""
        self.unwaited: set[int] = set()
        """Indices of asynchronous calls that their rank has not waited for, nor seen done."""
        self.watch: Callable[[CollectiveRecord, Call], None] | None = None
        """Receives each call as it is made, in the thread of its rank."""
        self._latest: dict[int, deque[CollectiveRecord]] = {}

    def add(self, record: CollectiveRecord, *, of_harness: bool = False) -> None:
        """Note a call, marked if its rank is in a block of `World.pause_clock`."""
        if of_harness:
            self.harness.add(len(self.collectives))
        self.collectives.append(record)
        latest = self._latest.get(record.rank)
        if latest is None:
            latest = self._latest[record.rank] = deque(maxlen=LATEST_CALLS)
        latest.append(record)

    def latest(self, rank: int) -> Sequence[CollectiveRecord]:
        """The last calls of one rank, at most `LATEST_CALLS`, in its program's order."""
        return tuple(self._latest.get(rank, ()))

    def history(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """Lines that tell the last calls of the ranks, for an error."""
        lines: list[str] = []
        for rank in ranks:
            calls = self.latest(rank)
            lines.append(f"last calls of rank {rank}:" if calls else f"no call of rank {rank} yet")
            lines.extend(f"  {record.text}" for record in calls)
        return tuple(lines)

    def note(self, rank: int, what: MomentKind, record: int) -> None:
        """Add a moment, now."""
        self.moments.append(Moment(self.tick, rank, what, record))

    def of_rank(self, rank: int) -> list[CollectiveRecord]:
        """The calls of one rank, in its program's order."""
        return [record for record in self.collectives if record.rank == rank]

    def digest(self, *, with_faults: bool = True) -> str:
        """A hash of every event; the folder of a call site is left out, so that it travels.

        Args:
            with_faults: Whether what came of planned faults is part of it.
        """
        state = hashlib.sha256()
        for record in self.collectives:
            state.update(repr(tuple(record._replace(file=basename(record.file)))).encode())
        state.update(repr([tuple(moment) for moment in self.moments]).encode())
        state.update(repr(self.turns).encode())
        for fault in self.faults if with_faults else ():
            state.update(repr((*fault[:-2], basename(fault.file), fault.line)).encode())
        return state.hexdigest()
