"""The timeline of an event log: issue and end of each call. All exporters use it."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from zero_sim.sim import CollectiveRecord, EventLog
from zero_sim.untrusted import printable

# Digits of a rank; a longer number in a log is ignored.
_RANK_CHARS_MAX = 9


@dataclass(frozen=True, kw_only=True, slots=True)
class CallSpan:
    """One rank's call on the clock of the timeline."""

    record: CollectiveRecord
    refused: bool
    """True if it did not match the other ranks' calls, which ended the run."""
    completed: bool
    """True if all members came with matching calls."""
    came: tuple[int, ...]
    """World ranks that came to this collective or message, in ascending order."""
    number: int
    """Number within the group, or within the messages of a pair of ranks; equal on all ranks."""
    peer: int | None
    """World rank at the other end of a message; None for collectives, and for a receive from any
    rank that no send matched."""
    issue_tick: int
    land_tick: int | None
    """Tick at which its rank's wait ended; None if it never did or the log has no such ticks."""
    of_harness: bool = False
    """True if it completed and the harness caused it on all ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Time for which a rank has the baton, as a half-open span."""

    rank: int
    start_tick: int
    stop_tick: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """All calls and turns of one run."""

    world_size: int
    calls: tuple[CallSpan, ...]
    """Calls in the order of issue."""
    turns: tuple[Turn, ...]
    stop_tick: int
    """Tick of the end of the run."""
    knows_landing: bool
    """True if the log has the ticks at which calls landed."""


def read_timeline(log: EventLog, *, with_harness: bool = False) -> Timeline:
    """Return every call and turn of a log on one clock.

    Args:
        log: Log of one run. The clock is that of its moments. Without moments, it ticks once per
            turn and once per call.
        with_harness: True to include collectives that the harness caused on all ranks. Incomplete
            ones are always included, because they may be the reason for the end of the run.
    """
    # The largest rank in any group or turn gives the world size.
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
        # -1, so that an empty log has 0 ranks.
        world_size=max((*ranks, *log.turns, -1)) + 1,
        calls=calls,
        turns=turns,
        stop_tick=stop,
        knows_landing=bool(landed),
    )


def _shown(record: CollectiveRecord) -> CollectiveRecord:
    """Return the record with printable names."""
    # Logs may come from strangers, and viewers print names without escaping them.
    return record._replace(
        kind=printable(record.kind),
        group=printable(record.group),
        dtype=printable(record.dtype),
        detail=printable(record.detail),
        file=printable(record.file),
    )


def _assign_turns(log: EventLog) -> list[int]:
    """Return the turn of each call: the first possible one, because calls keep their order."""
    of_rank: dict[int, list[int]] = defaultdict(list)
    for turn, rank in enumerate(log.turns):
        of_rank[rank].append(turn)
    assigned: list[int] = []
    turn = 0
    for record in log.collectives:
        own = of_rank[record.rank]
        place = bisect_left(own, turn)
        # A rank without a further turn occurs in cut or forged logs only.
        turn = own[place] if place < len(own) else turn
        assigned.append(turn)
    return assigned


def _from_order(log: EventLog) -> tuple[list[int], tuple[Turn, ...], int]:
    """Return issue ticks, turns and the end, from the order of calls and turns alone."""
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
    """Return issue ticks, turns and the end, from the moments of the log."""
    ticks = {moment.record: moment.tick for moment in log.moments if moment.what == "issue"}
    # Spans are half-open, so the end comes one tick after the last moment.
    stop = max(moment.tick for moment in log.moments) + 1
    issue: list[int] = []
    for index in range(len(log.collectives)):
        # A call without a moment is placed at the call before it.
        issue.append(ticks.get(index, issue[-1] if issue else 0))
    first: dict[int, int] = {}
    for index, turn in enumerate(_assign_turns(log)):
        first.setdefault(turn, issue[index])
    starts: list[int] = []
    # The log has no ticks of turns. A turn without calls starts with the next turn that has one.
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
    """One collective or message, complete or not."""

    number: int
    came: set[int]
    completed: bool = False
    by_program: bool = False
    """True if a rank called it outside the blocks of the harness."""
    ends: tuple[int | None, int | None] = (None, None)
    """Sender and receiver of a message."""

    @property
    def of_harness(self) -> bool:
        """True if it completed and the harness caused it on all ranks."""
        return self.completed and not self.by_program

    def peer_of(self, record: CollectiveRecord) -> int | None:
        sender, receiver = self.ends
        return receiver if record.kind == "send" else sender if record.kind == "recv" else None


def _operations_in(log: EventLog) -> list[_Operation]:
    """Return the operation of each call, matched by the rules of the simulated world."""
    # Calls of a collective have the same group and sequence number; see `zero_sim.sim`.
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
            # As a set: a rank that a forged log repeats counts once.
            operation.completed = len(operation.came) == len(record.group_ranks)
        operation.by_program |= index not in log.harness
        found.append(operation)
        # All ranks may have come, but the last call did not match those of the others.
        if index == log.refused:
            operation.completed = False
    messages.number()
    return found


class _Messages:
    """Sends and receives, matched in order of issue as in the simulated world."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, str, int, int], deque[_Operation]] = defaultdict(deque)
        self._posted: list[tuple[str, _Operation]] = []

    def post(self, record: CollectiveRecord) -> _Operation:
        named = record.detail.removeprefix("peer ")
        peer = int(named) if named.isdecimal() and len(named) < _RANK_CHARS_MAX else None
        # A forged log may name a rank outside the group.
        peer = peer if peer in record.group_ranks else None
        sends = record.kind == "send"
        # For messages, this field contains the tag of send and recv.
        tag = record.sequence
        if sends:
            waiting = self._waiting[record.group, "recv", peer or 0, tag]
        else:
            waiting = self._waiting[record.group, "send", record.rank, tag]
        # First come, first served; a receive without a peer matches any sender.
        for other in waiting:
            source, _ = other.ends
            if (source in (None, record.rank)) if sends else (peer in (None, source)):
                # The loop over `waiting` ends here, so its change does no harm.
                waiting.remove(other)
                other.came.add(record.rank)
                other.completed = True
                other.ends = (record.rank, peer) if sends else (source, record.rank)
                return other
        # No match yet: wait for the other end, under the key that it will look for.
        ends = (record.rank, peer) if sends else (peer, record.rank)
        operation = _Operation(0, {record.rank}, ends=ends)
        self._posted.append((record.group, operation))
        to = peer if sends else record.rank
        self._waiting[record.group, record.kind, to or 0, tag].append(operation)
        return operation

    def number(self) -> None:
        """Number the messages of each pair of ranks, after all receives have their sender."""
        counts: dict[tuple[str, frozenset[int | None]], int] = defaultdict(int)
        for group, operation in self._posted:
            pair = (group, frozenset(operation.ends))
            operation.number = counts[pair]
            counts[pair] += 1
