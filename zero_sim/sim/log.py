"""Records of every event in a run. Reports read nothing else."""

from __future__ import annotations

import hashlib
import html
from collections import deque
from collections.abc import Callable, Sequence
from os.path import basename
from typing import Literal, NamedTuple

from zero_sim.sim.call import Call
from zero_sim.sim.callsite import site_of

MomentKind = Literal["issue", "read", "perform", "write", "wait", "land"]

ROWS_SHOWN = 200
"""Number of calls in a notebook's table."""
_COLUMNS = ("rank", "call", "group", "dtype", "elements", "detail", "site")
LATEST_CALLS = 3
"""Number of last calls per rank that an error shows."""


class CollectiveRecord(NamedTuple):
    """A rank's call: a collective, a send or a receive."""

    rank: int
    kind: str
    """`all_reduce`, `reduce_scatter`, `all_gather`, ..., for all of torch's spellings."""
    group: str
    """Name of the group; `world` for the default group."""
    group_ranks: tuple[int, ...]
    """The members' world ranks, in group-rank order."""
    sequence: int
    """Number of earlier collectives of the rank on this group; a send's or receive's tag."""
    dtype: str
    elems: int
    """Elements that the rank contributes; if none, elements that it receives."""
    elem_bytes: int
    detail: str
    """Reduce operation, root or peer."""
    asynchronous: bool
    file: str
    line: int
    output_elems: int = 0
    """Elements that the rank receives."""

    @property
    def bytes(self) -> int:
        """Size of `elems` in bytes. A backend's traffic may differ.

        For `broadcast` and `reduce`, the whole tensor on every rank, root or not.
        """
        return self.elems * self.elem_bytes

    @property
    def site(self) -> str:
        """Call site, `file:line`."""
        return site_of(self.file, self.line)

    @property
    def text(self) -> str:
        """Description of the call, with its call site."""
        # Messages match by tag, collectives by number.
        number = f"tag {self.sequence}" if self.kind in ("send", "recv") else f"#{self.sequence}"
        # Barriers have no dtype and no elements.
        parts = [self.dtype, f"{self.elems} elements"] if self.elem_bytes else []
        if self.detail:
            parts.append(self.detail)
        return f"{self.kind} {number} of group {self.group} ({', '.join(parts)}) at {self.site}"


class Moment(NamedTuple):
    """An event in the life of a rank's call.

    With eager timing, only `issue`, `wait` and `land` are noted: reading, performing and writing
    coincide with the last member's issue.
    """

    tick: int
    """Number of calls into the world so far, by all ranks."""
    rank: int
    what: MomentKind
    """`issue`; `read`: inputs were read; `perform`: all members' inputs were combined; `write`:
    outputs were written into the rank's memory; `wait`: the wait began; `land`: it returned."""
    record: int
    """Index into `EventLog.collectives`."""


class FaultRecord(NamedTuple):
    """A planned fault's outcome."""

    index: int
    """Position in the plan."""
    kind: str
    rank: int
    fired: bool
    """True if the fault happened."""
    when: str
    """Description of the due call; empty if the call never came, and for `slow`."""
    effect: str
    """The fault's effect, or the reason why nothing happened."""
    file: str
    line: int

    @property
    def site(self) -> str:
        """Call site of the due call, `file:line`; empty without a call."""
        return site_of(self.file, self.line) if self.file else ""

    def __str__(self) -> str:
        when = f" {self.when}" if self.when else ""
        site = f", {self.site}" if self.site else ""
        return f"{self.kind} of rank {self.rank}{when}{site}: {self.effect}"


class EventLog:
    """A run's events, in order of time."""

    def __init__(self) -> None:
        self.tick = 0
        """Number of calls into the world so far. The time in `moments`."""
        self.collectives: list[CollectiveRecord] = []
        self.moments: list[Moment] = []
        self.turns: list[int] = []
        """Ranks that got the baton, in order."""
        self.faults: list[FaultRecord] = []
        """A record per planned fault: first faults that happened, in order of time."""
        self.refused: int | None = None
        """Index of the call that violated the contract and ended the run."""
        self.harness: set[int] = set()
        """Indices of calls in `World.pause_clock`, by a harness or on its behalf. Exports, counts
        and timelines omit them. Not part of the digest."""
        self.unwaited: set[int] = set()
        """Indices of asynchronous calls that their rank has neither waited for nor seen done."""
        self.watch: Callable[[CollectiveRecord, Call], None] | None = None
        """Receives each call, in the rank's thread."""
        # By rank, to save errors a search of all calls.
        self._latest: dict[int, deque[CollectiveRecord]] = {}

    def __repr__(self) -> str:
        ranks = len({record.rank for record in self.collectives})
        return f"EventLog({len(self.collectives):,} calls of {ranks} ranks, {self.tick:,} ticks)"

    def _repr_html_(self) -> str:
        """Return the calls as a table for notebooks."""
        rows = self.collectives[:ROWS_SHOWN]
        cells = [
            (record.rank, record.kind, record.group, record.dtype, f"{record.elems:,}",
             record.detail, record.site)
            for record in rows
        ]  # fmt: skip
        # Group names and paths come from the program.
        body = "".join(
            f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in row)}</tr>"
            for row in cells
        )
        head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
        more = len(self.collectives) - len(rows)
        rest = f"<p>and {more:,} more</p>" if more else ""
        return f"<table><tr>{head}</tr>{body}</table>{rest}"

    def add(self, record: CollectiveRecord, *, of_harness: bool = False) -> None:
        """Add a call. `of_harness` marks calls inside `World.pause_clock`."""
        if of_harness:
            self.harness.add(len(self.collectives))
        self.collectives.append(record)
        latest = self._latest.get(record.rank)
        if latest is None:
            latest = self._latest[record.rank] = deque(maxlen=LATEST_CALLS)
        latest.append(record)

    def latest(self, rank: int) -> Sequence[CollectiveRecord]:
        """Return a rank's last calls, at most `LATEST_CALLS`, oldest first."""
        # A copy, because errors keep it while the run goes on.
        return tuple(self._latest.get(rank, ()))

    def history(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """Return lines about the ranks' last calls, for an error."""
        lines: list[str] = []
        for rank in ranks:
            calls = self.latest(rank)
            lines.append(f"last calls of rank {rank}:" if calls else f"no call of rank {rank} yet")
            lines.extend(f"  {record.text}" for record in calls)
        return tuple(lines)

    def note(self, rank: int, what: MomentKind, record: int) -> None:
        """Add a moment at the current tick."""
        self.moments.append(Moment(self.tick, rank, what, record))

    def of_rank(self, rank: int) -> list[CollectiveRecord]:
        """Return a rank's calls, in program order."""
        return [record for record in self.collectives if record.rank == rank]

    def digest(self, *, with_faults: bool = True) -> str:
        """Return a hash of all events. `with_faults` includes outcomes of planned faults."""
        state = hashlib.sha256()
        for record in self.collectives:
            # Only the file's base name, because the digest must be the same in any checkout.
            state.update(repr(tuple(record._replace(file=basename(record.file)))).encode())
        state.update(repr([tuple(moment) for moment in self.moments]).encode())
        # The schedule counts too: equal digests mean the same interleaving.
        state.update(repr(self.turns).encode())
        for fault in self.faults if with_faults else ():
            state.update(repr((*fault[:-2], basename(fault.file), fault.line)).encode())
        return state.hexdigest()
