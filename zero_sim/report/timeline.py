"""Timeline of an event log: issue and end of each call. All exporters use it."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from zero_sim.sim import CollectiveRecord, EventLog
from zero_sim.untrusted import printable

# Longer numbers in a log are ignored, because a forged log may contain any.
_RANK_CHARS_MAX = 9


@dataclass(frozen=True, kw_only=True, slots=True)
class CallSpan:
    """A rank's call on the timeline."""

    record: CollectiveRecord
    refused: bool
    """True if it did not match the other ranks' calls, so it ended the run."""
    completed: bool
    """True if all members came with matching calls."""
    came: tuple[int, ...]
    """World ranks that came to this collective or message, in ascending order."""
    number: int
    """Number of the collective in its group, or of the message between its two ranks. Equal on all
    ranks."""
    peer: int | None
    """World rank at the other end of a message. None for collectives, and for an unmatched receive
    from any rank."""
    issue_tick: int
    land_tick: int | None
    """Tick at which the rank's wait ended. None if it never ended, or the log has no such ticks."""
    of_harness: bool = False
    """True if it completed and the harness caused it on all ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """A rank's turn, as a half-open span."""

    rank: int
    start_tick: int
    stop_tick: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """All calls and turns in a run."""

    world_size: int
    calls: tuple[CallSpan, ...]
    """Calls in order of issue."""
    turns: tuple[Turn, ...]
    stop_tick: int
    """Tick at which the run ended."""
    knows_landing: bool
    """True if the log has the ticks at which calls landed."""


def read_timeline(log: EventLog, *, with_harness: bool = False) -> Timeline:
    """Return all calls and turns in a log, on a common clock.

    Args:
        log: Log of a run. If it has moments, these give the ticks. Otherwise the clock ticks at
            each turn and call.
        with_harness: True to include collectives that the harness caused on all ranks. Incomplete
            calls are always included, because they may have ended the run.
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
        # The default -1 gives an empty log 0 ranks.
        world_size=max((*ranks, *log.turns, -1)) + 1,
        calls=calls,
        turns=turns,
        stop_tick=stop,
        knows_landing=bool(landed),
    )


def _shown(record: CollectiveRecord) -> CollectiveRecord:
    """Make all names in a record printable."""
    # Logs may come from strangers, and viewers do not escape names.
    return record._replace(
        kind=printable(record.kind),
        group=printable(record.group),
        dtype=printable(record.dtype),
        detail=printable(record.detail),
        file=printable(record.file),
    )


def _assign_turns(log: EventLog) -> list[int]:
    """Return the turn of each call."""
    # Calls keep their order, so take the rank's first turn from the previous call's turn on.
    of_rank: dict[int, list[int]] = defaultdict(list)
    for turn, rank in enumerate(log.turns):
        of_rank[rank].append(turn)
    assigned: list[int] = []
    turn = 0
    for record in log.collectives:
        own = of_rank[record.rank]
        place = bisect_left(own, turn)
        # Only in cut or forged logs does a calling rank have no further turn.
        turn = own[place] if place < len(own) else turn
        assigned.append(turn)
    return assigned


def _from_order(log: EventLog) -> tuple[list[int], tuple[Turn, ...], int]:
    """Return issue ticks, turns and end tick, by the order of calls and turns."""
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
    """Return issue ticks, turns and end tick, by the log's moments."""
    ticks = {moment.record: moment.tick for moment in log.moments if moment.what == "issue"}
    # Spans are half-open, so the end is a tick after the last moment.
    stop = max(moment.tick for moment in log.moments) + 1
    issue: list[int] = []
    for index in range(len(log.collectives)):
        # If a call has no moment, use the previous call's tick.
        issue.append(ticks.get(index, issue[-1] if issue else 0))
    first: dict[int, int] = {}
    for index, turn in enumerate(_assign_turns(log)):
        first.setdefault(turn, issue[index])
    starts: list[int] = []
    # The log has no ticks for turns. A turn without calls starts together with the next turn that
    # has a call.
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
    """A collective or message, complete or not."""

    number: int
    came: set[int]
    completed: bool = False
    by_program: bool = False
    """True if a rank called it outside of a harness block."""
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
    """Return each call's operation, matched by the rules of the simulated world."""
    # All calls of a collective have the same group and sequence number; see `zero_sim.sim`.
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
            # A set, because a forged log may repeat a rank.
            operation.completed = len(operation.came) == len(record.group_ranks)
        operation.by_program |= index not in log.harness
        found.append(operation)
        # All ranks may have come, but the last call did not match.
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
        # In a forged log, the peer may be outside of the group.
        peer = peer if peer in record.group_ranks else None
        sends = record.kind == "send"
        # For messages, this field contains the tag.
        tag = record.sequence
        if sends:
            waiting = self._waiting[record.group, "recv", peer or 0, tag]
        else:
            waiting = self._waiting[record.group, "send", record.rank, tag]
        # First come, first served. A receive without a peer matches any sender.
        for other in waiting:
            source, _ = other.ends
            if (source in (None, record.rank)) if sends else (peer in (None, source)):
                # Safe inside the loop over `waiting`, because the loop ends here.
                waiting.remove(other)
                other.came.add(record.rank)
                other.completed = True
                other.ends = (record.rank, peer) if sends else (source, record.rank)
                return other
        # No match yet. Wait under the key that the other end will look up.
        ends = (record.rank, peer) if sends else (peer, record.rank)
        operation = _Operation(0, {record.rank}, ends=ends)
        self._posted.append((record.group, operation))
        to = peer if sends else record.rank
        self._waiting[record.group, record.kind, to or 0, tag].append(operation)
        return operation

    def number(self) -> None:
        """Number the messages of each pair of ranks, once all receives know their sender."""
        counts: dict[tuple[str, frozenset[int | None]], int] = defaultdict(int)
        for group, operation in self._posted:
            pair = (group, frozenset(operation.ends))
            operation.number = counts[pair]
            counts[pair] += 1
