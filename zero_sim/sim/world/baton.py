"""The baton: exactly one rank runs at a time, and control moves only where a rank blocks."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Sequence
from typing import Protocol

from zero_sim.sim.callsite import hide_simulator
from zero_sim.sim.contract.inversions import describe_circle, describe_inversion, find_inversion
from zero_sim.sim.failures import (
    Deadlock,
    RankEnded,
    RankFailed,
    RankStatus,
    ScheduleDiverged,
    TimedOut,
    WorldFailure,
)
from zero_sim.sim.inflight.timing import Timing
from zero_sim.sim.log import EventLog
from zero_sim.sim.schedule import Schedule
from zero_sim.sim.waits import Awaited
from zero_sim.sim.world.rank_threads import check_not_forked

CALLER = -1
"""Owner number of `World.run`'s thread, whose process state the ranks borrow."""

_STRETCH_SECONDS = 1.0

FRUITLESS_POLLS_MAX = 1000
"""Limit on polls of an unfinished work with no other rank ready, before this is a deadlock."""


class RankLocal(Protocol):
    """Process state that each rank has for itself. It moves with the baton."""

    def begin(self, caller: int) -> None:
        """Forget all ranks, and save the current state as `caller`'s."""
        ...

    def take_out(self, owner: int) -> None:
        """Save the current state as `owner`'s."""
        ...

    def put_in_place(self, owner: int, *, previous: int) -> None:
        """Restore `owner`'s state, just after `previous`'s was taken out."""
        ...


class _Timeouts:
    """Time-outs of waiting ranks. Simulated time only advances when a time-out ends."""

    __slots__ = ("_now_seconds", "over", "pending")

    def __init__(self) -> None:
        self._now_seconds = 0.0
        self.pending: dict[int, tuple[float, float]] = {}
        """End time and length by rank, both in seconds."""
        self.over: dict[int, TimedOut] = {}
        """Error to raise, by rank."""

    def begin(self, rank: int, seconds: float) -> None:
        self.pending[rank] = (self._now_seconds + seconds, seconds)

    def end(self, rank: int) -> TimedOut | None:
        """Forget the rank's time-out. Return its error if it has ended."""
        self.pending.pop(rank, None)
        return self.over.pop(rank, None)

    def pass_first(self) -> tuple[int, float]:
        """Advance time to the end of the first time-out. Return its rank and length in seconds."""
        # Ties go to the lowest rank, because the run must be deterministic.
        rank = min(self.pending, key=lambda each: (self.pending[each][0], each))
        self._now_seconds, seconds = self.pending.pop(rank)
        return rank, seconds


class InterruptibleEvent(threading.Event):
    """An event that waits in short pieces.

    If a signal arrives just before a wait, Python handles it only after this wait.
    """

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the event is set, or `timeout` seconds. Return True if it is set."""
        left = threading.TIMEOUT_MAX if timeout is None else timeout
        while left > _STRETCH_SECONDS:
            if super().wait(_STRETCH_SECONDS):
                return True
            left -= _STRETCH_SECONDS
        return super().wait(left)


class Baton:
    """Hand-over of control between rank threads during a run."""

    def __init__(
        self,
        gates: list[threading.Lock],
        *,
        schedule: Schedule,
        log: EventLog,
        rank_local: Sequence[RankLocal],
    ) -> None:
        self.gates = gates
        self.schedule = schedule
        self.log = log
        self.all_ended = InterruptibleEvent()
        self.failure: WorldFailure | None = None
        self.holder = CALLER
        self._rank_local = rank_local
        """Restored in this order."""
        self._waiting: dict[int, tuple[Awaited, str]] = {}
        self._timeouts = _Timeouts()
        # Ranks whose program has not ended.
        self._running = set(range(len(gates)))
        self._fruitless_polls = 0

    def start(self, timing: Timing) -> None:
        """Make every rank ready and hand over to the first. Called by `World.run`'s thread."""
        self._timing = timing
        for each in self._rank_local:
            each.begin(CALLER)
        # All ranks begin ready, in rank order.
        for rank in range(len(self.gates)):
            self.schedule.add(rank)
        self._hand_over()

    def restore_caller(self) -> None:
        """Restore the calling thread's process state, after the last rank ended."""
        self._put_in_place(CALLER)

    def enter(self, rank: int) -> None:
        """Become the holder. Called first in a woken rank thread."""
        self._put_in_place(rank)
        self.holder = rank
        # If the world ended meanwhile, this unwinds the rank.
        self.check_alive()

    def advance(self) -> None:
        """Count a call into the world. Each call begins with this.

        Raises:
            WorldFailure: A due operation failed.
        """
        check_not_forked()
        self.check_alive()
        self.log.tick += 1
        self._timing.advance()

    def wait_for(
        self, rank: int, awaited: Awaited, site: str, *, timeout_seconds: float | None = None
    ) -> None:
        """Block `rank` until `awaited` is done, and let others run meanwhile.

        `site` is the call site, for the deadlock table. `timeout_seconds` counts in simulated time,
        which stands still while any rank can run.

        Raises:
            TimedOut: No rank could run, and this time-out ended first.
        """
        self.check_alive()
        if awaited.done:
            return
        # Before the hand-over, because the next rank may finish the wait.
        awaited.waiters.append(rank)
        self._waiting[rank] = (awaited, site)
        if timeout_seconds is not None:
            self._timeouts.begin(rank, timeout_seconds)
        self._yield(rank)
        error = self._timeouts.end(rank)
        if error is not None:
            raise error

    def poll(self, rank: int, awaited: Awaited, site: str) -> bool:
        """Return True if `awaited` is done; if not, first give every ready rank a turn."""
        if awaited.done or self.failure is not None:
            return awaited.done
        turns = self.turns
        # Still ready, but after the others, because polls must not starve them.
        self.schedule.defer(rank)
        self._waiting[rank] = (awaited, site)
        self._yield(rank)
        self._waiting.pop(rank, None)
        # If this rank also got the next turn, no other rank was ready: the poll was fruitless.
        self._fruitless_polls = self._fruitless_polls + 1 if self.turns == turns + 1 else 0
        if self._fruitless_polls > FRUITLESS_POLLS_MAX:
            self._waiting[rank] = (awaited, site)
            # An endless poll would otherwise look like a stalled rank, without a table.
            self.failure = self._deadlock()
            raise RankEnded
        return awaited.done

    @property
    def turns(self) -> int:
        """Number of turns so far."""
        return len(self.log.turns)

    @property
    def is_held(self) -> bool:
        """True if the chosen rank already runs, False if it was woken but does not run yet."""
        return self.log.turns[-1:] == [self.holder]

    def fail(self, failure: WorldFailure) -> WorldFailure:
        """End the world, even if the program catches the failure. Return it for raising."""
        if self.failure is None:
            self.failure = failure
        return failure

    def check_alive(self) -> None:
        """Unwind the calling rank if the world has ended."""
        if self.failure is not None:
            raise RankEnded

    def finish(self, awaited: Awaited) -> None:
        """Make the waiting ranks ready again."""
        for rank in awaited.waiters:
            self._waiting.pop(rank, None)
            self.schedule.add(rank)
        awaited.waiters = []

    def end_rank(self, rank: int, error: BaseException | None) -> None:
        """Note a rank's end or failure, and hand over. Each program on a rank ends with this."""
        self._running.discard(rank)
        if error is not None and self.failure is None:
            self.failure = _as_failure(rank, error)
        try:
            self._take_out(rank)
        except Exception as raised:  # noqa: BLE001  The baton must move on in any case.
            self.failure = self.failure or _as_failure(rank, raised)
        self._hand_over()

    def _take_out(self, owner: int) -> None:
        for each in self._rank_local:
            each.take_out(owner)

    def _put_in_place(self, owner: int) -> None:
        for each in self._rank_local:
            each.put_in_place(owner, previous=self.holder)

    def _yield(self, rank: int) -> None:
        self._take_out(rank)
        # If the same rank was picked, its gate stays shut and it goes on at once.
        if not self._hand_over(rank):
            self.gates[rank].acquire()
        self.enter(rank)

    # [Note: hand-over] Each rank thread sleeps on a lock of its own, its gate. To hand over, a
    # thread picks the next rank, opens that rank's gate, and sleeps on its own. For a moment both
    # threads are awake, but the previous thread no longer touches shared state. So `sim` needs no
    # other lock.
    def _hand_over(self, rank: int = CALLER) -> bool:
        """Open the next rank's gate. If the next rank is `rank`, return True instead."""
        chosen = self._next_rank()
        if chosen is None:
            self.all_ended.set()
            return False
        self.log.turns.append(chosen)
        if chosen == rank:
            return True
        self.gates[chosen].release()
        return False

    def _next_rank(self) -> int | None:
        chosen = None
        # Look for a rank to run, then for a time-out, then report the deadlock.
        if self.failure is None:
            try:
                chosen = self.schedule.pick()
                # Only the timing can make a rank ready now, by performing an operation.
                while chosen is None and self._timing.force(running=bool(self._running)):
                    chosen = self.schedule.pick()
            except ScheduleDiverged as failure:
                self.failure = failure
        if self.failure is None:
            if chosen is not None or not self._running:
                return chosen
            if self._timeouts.pending:
                return self._time_out_first()
            self.failure = self._deadlock()
        # The world has ended: wake the other ranks in turn, to unwind each.
        return min(self._running, default=None)

    def _time_out_first(self) -> int | None:
        """End the first time-out, and return the next rank to run."""
        rank, seconds = self._timeouts.pass_first()
        # Describe the deadlock while this rank still counts as waiting.
        deadlock = self._deadlock()
        awaited, _ = self._waiting.pop(rank)
        awaited.waiters.remove(rank)
        self._timeouts.over[rank] = TimedOut(
            awaited.doing, awaited.missing, deadlock, seconds=seconds
        )
        self.schedule.add(rank)
        return self._next_rank()

    def _deadlock(self) -> Deadlock:
        # Ranks often share a wait. Describe each wait once.
        waits = {id(awaited): awaited for awaited, _ in self._waiting.values()}
        described = {key: (awaited.doing, awaited.missing) for key, awaited in waits.items()}
        statuses = []
        for rank in range(len(self.gates)):
            doing, missing, site = "returned", (), ""
            if rank in self._waiting:
                awaited, site = self._waiting[rank]
                doing, missing = described[id(awaited)]
            calls = self.log.latest(rank)
            if calls and calls[-1].site == site:
                calls = calls[:-1]  # The call in which the rank waits is already in `doing`.
            recent = tuple([record.text for record in calls])
            statuses.append(
                RankStatus(rank=rank, doing=doing, site=site, missing=missing, recent=recent)
            )
        # A circle of waits explains more than an inverted order of collectives.
        cycle = describe_circle(self._waiting)
        if not cycle:
            cycle = describe_inversion(find_inversion(self.log.collectives))
        return Deadlock(tuple(statuses), cycle=cycle)


def _as_failure(rank: int, error: BaseException) -> WorldFailure:
    if isinstance(error, WorldFailure):
        return error
    # If the program does not catch a time-out, report the deadlock behind it.
    if isinstance(error, TimedOut):
        return error.deadlock
    hide_simulator(error)
    return RankFailed(rank, error, "".join(traceback.format_exception(error)))
