"""The timeline of an event log: when each call was issued, when it ended, and whether it did.

The one reading of a log that all exporters share.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from zero_sim.sim import CollectiveRecord, EventLog
from zero_sim.untrusted import printable

_RANK_CHARS_MAX = 9
"""More digits than any rank has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallSpan:
    """One rank's call, in its place."""

    record: CollectiveRecord
    refused: bool
    """True if it did not fit the others' calls and so ended the run."""
    completed: bool
    """True if all members came, with calls that fit."""
    came: tuple[int, ...]
    """World ranks that came to this collective or message, in rank order."""
    number: int
    """Number within the group, or within the mail of a pair of ranks: equal for all who came."""
    peer: int | None
    """World rank at the other end of a message; None for collectives, and where nobody was named
    and nobody came."""
    issue_tick: int
    land_tick: int | None
    """When its rank was done waiting for it; None where the log does not know or it never was."""
    of_harness: bool = False
    """True if it completed and a harness made it, or had the program make it, on all ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """A rank holds the baton; the span is half-open."""

    rank: int
    start_tick: int
    stop_tick: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """One run."""

    world_size: int
    calls: tuple[CallSpan, ...]
    """Calls in the order of issue."""
    turns: tuple[Turn, ...]
    stop_tick: int
    """When all was over."""
    knows_landing: bool
    """True if the log has the times at which calls landed."""


def read_timeline(log: EventLog, *, with_harness: bool = False) -> Timeline:
    """Place every call and every turn of a log on one clock.

    Args:
        log: The log of one run. Where it has moments, their ticks are the clock; where not, the
            clock ticks once a turn and once a call.
        with_harness: Whether to include collectives that are the harness's on all ranks. Those that
            did not complete are always included, because they may be why the run ended.
    """
    groups = {record.group_ranks for record in log.collectives}
    ranks = [rank for group in groups for rank in group]
    issue, turns, stop = _from_moments(log) if log.moments else _from_order(log)
    landed = {moment.record: moment.tick for moment in log.moments if moment.what == "land"}
    operations = _operations_in(log)
    calls = tuple(
        CallSpan(
            record=_shown(record),
            refused=index == log.refused,
            completed=operations[index].completed,
            came=tuple(sorted(operations[index].came)),
            number=operations[index].number,
            peer=operations[index].peer_of(record),
            issue_tick=issue[index],
            land_tick=landed.get(index),
            of_harness=operations[index].of_harness,
        )
        for index, record in enumerate(log.collectives)
        if with_harness or not operations[index].of_harness
    )
    return Timeline(
        world_size=max((*ranks, *log.turns, -1)) + 1,
        calls=calls,
        turns=turns,
        stop_tick=stop,
        knows_landing=bool(landed),
    )


def _shown(record: CollectiveRecord) -> CollectiveRecord:
    """The record as viewers may have it: they print names as they are."""
    return record._replace(
        kind=printable(record.kind),
        group=printable(record.group),
        dtype=printable(record.dtype),
        detail=printable(record.detail),
        file=printable(record.file),
    )


def _assign_turns(log: EventLog) -> list[int]:
    """The turn in which each call was issued: the first one that fits, since calls keep order."""
    of_rank: dict[int, list[int]] = defaultdict(list)
    for turn, rank in enumerate(log.turns):
        of_rank[rank].append(turn)
    assigned: list[int] = []
    turn = 0
    for record in log.collectives:
        own = of_rank[record.rank]
        place = bisect_left(own, turn)
        turn = own[place] if place < len(own) else turn
        assigned.append(turn)
    return assigned


def _from_order(log: EventLog) -> tuple[list[int], tuple[Turn, ...], int]:
    issue: list[int] = []
    starts: list[int] = []
    tick = 0
    for turn in _assign_turns(log):
        while len(starts) <= turn < len(log.turns):
            starts.append(tick)
            tick += 1
        issue.append(tick)
        tick += 1
    while len(starts) < len(log.turns):
        starts.append(tick)
        tick += 1
    return issue, _spans(log.turns, starts, tick), tick


def _from_moments(log: EventLog) -> tuple[list[int], tuple[Turn, ...], int]:
    ticks = {moment.record: moment.tick for moment in log.moments if moment.what == "issue"}
    stop = max(moment.tick for moment in log.moments) + 1
    issue: list[int] = []
    for index in range(len(log.collectives)):
        issue.append(ticks.get(index, issue[-1] if issue else 0))
    first: dict[int, int] = {}
    for index, turn in enumerate(_assign_turns(log)):
        first.setdefault(turn, issue[index])
    starts: list[int] = []
    # A turn without a call of its own takes no time before the next one that has.
    following = stop
    for turn in reversed(range(len(log.turns))):
        following = min(following, first.get(turn, following))
        starts.append(following)
    starts.reverse()
    return issue, _spans(log.turns, starts, stop), stop


def _spans(ranks: Sequence[int], starts: Sequence[int], stop: int) -> tuple[Turn, ...]:
    stops = [*starts, stop][1:]
    return tuple(
        Turn(rank=rank, start_tick=start, stop_tick=end)
        for rank, start, end in zip(ranks, starts, stops, strict=True)
    )


@dataclass(slots=True)
class _Operation:
    """One collective or message, as far as it came."""

    number: int
    came: set[int]
    completed: bool = False
    by_program: bool = False
    """True if a rank made it that was in no block of a harness."""
    ends: tuple[int | None, int | None] = (None, None)
    """Sender and receiver of a message."""

    @property
    def of_harness(self) -> bool:
        """True if it completed and was the harness's on all ranks."""
        return self.completed and not self.by_program

    def peer_of(self, record: CollectiveRecord) -> int | None:
        sender, receiver = self.ends
        return receiver if record.kind == "send" else sender if record.kind == "recv" else None


def _operations_in(log: EventLog) -> list[_Operation]:
    """The meeting that each call belongs to, found as the world finds it."""
    messages = _Messages()
    open_: dict[tuple[str, tuple[int, ...], int], _Operation] = {}
    found: list[_Operation] = []
    for index, record in enumerate(log.collectives):
        if record.kind in ("send", "recv"):
            operation = messages.post(record)
        else:
            key = (record.group, record.group_ranks, record.sequence)
            operation = open_.setdefault(key, _Operation(record.sequence, set()))
            operation.came.add(record.rank)
            operation.completed = len(operation.came) == len(record.group_ranks)
        operation.by_program |= index not in log.harness
        found.append(operation)
        if index == log.refused:
            operation.completed = False
    messages.number()
    return found


class _Messages:
    """Sends and receives, paired first come first served as the world pairs them."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, str, int, int], deque[_Operation]] = defaultdict(deque)
        self._posted: list[tuple[str, _Operation]] = []

    def post(self, record: CollectiveRecord) -> _Operation:
        named = record.detail.removeprefix("peer ")
        peer = int(named) if named.isdecimal() and len(named) < _RANK_CHARS_MAX else None
        # Of a log that was made up: there is no such rank.
        peer = peer if peer in record.group_ranks else None
        sends = record.kind == "send"
        tag = record.sequence
        if sends:
            waiting = self._waiting[record.group, "recv", peer or 0, tag]
        else:
            waiting = self._waiting[record.group, "send", record.rank, tag]
        for other in waiting:
            source, _ = other.ends
            if (source in (None, record.rank)) if sends else (peer in (None, source)):
                waiting.remove(other)
                other.came.add(record.rank)
                other.completed = True
                other.ends = (record.rank, peer) if sends else (source, record.rank)
                return other
        ends = (record.rank, peer) if sends else (peer, record.rank)
        operation = _Operation(0, {record.rank}, ends=ends)
        self._posted.append((record.group, operation))
        to = peer if sends else record.rank
        self._waiting[record.group, record.kind, to or 0, tag].append(operation)
        return operation

    def number(self) -> None:
        """Count the messages of each pair of ranks, once it is known who received from whom."""
        counts: dict[tuple[str, frozenset[int | None]], int] = defaultdict(int)
        for group, operation in self._posted:
            pair = (group, frozenset(operation.ends))
            operation.number = counts[pair]
            counts[pair] += 1
