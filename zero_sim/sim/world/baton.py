"""One baton: exactly one rank runs at a time, and it changes hands only where a rank blocks.

[Note: hand-over]
Every rank thread sleeps on a lock of its own, its gate. Handing over is: pick the next rank, open
its gate, sleep on one's own. Between the two calls both threads are awake for a moment, but the one
that hands over touches nothing shared any more. So no other lock is needed anywhere in `sim`.
"""

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
"""Owner number of the thread that called `World.run`, in the randomness it lends to the ranks."""

_STRETCH_SECONDS = 1.0

FRUITLESS_POLLS_MAX = 1000
"""After so many polls of one unfinished work while nobody else can run, polling is a deadlock."""


class RankLocal(Protocol):
    """What else of a process each rank has for itself, and moves with the baton."""

    def begin(self, caller: int) -> None:
        """Forget all ranks, and take out what is in place as `caller`'s."""
        ...

    def take_out(self, owner: int) -> None:
        """Save what is in place as `owner`'s."""
        ...

    def put_in_place(self, owner: int, *, previous: int) -> None:
        """Make what `owner` has the process's; `previous`'s was taken out just before."""
        ...


class _Timeouts:
    """Time-outs of waiting ranks, in simulated time: it passes only when a time-out is over."""

    __slots__ = ("_now_seconds", "over", "pending")

    def __init__(self) -> None:
        self._now_seconds = 0.0
        self.pending: dict[int, tuple[float, float]] = {}
        """By rank: time at which it is over, and its length, both in seconds."""
        self.over: dict[int, TimedOut] = {}
        """By rank: the error to raise there."""

    def begin(self, rank: int, seconds: float) -> None:
        self.pending[rank] = (self._now_seconds + seconds, seconds)

    def end(self, rank: int) -> TimedOut | None:
        """Forget the rank's time-out; its error if it is over."""
        self.pending.pop(rank, None)
        return self.over.pop(rank, None)

    def pass_first(self) -> tuple[int, float]:
        """Let time pass until the first time-out is over; its rank and length in seconds."""
        rank = min(self.pending, key=lambda each: (self.pending[each][0], each))
        self._now_seconds, seconds = self.pending.pop(rank)
        return rank, seconds


class InterruptibleEvent(threading.Event):
    """An event whose waits have stretches, so an interrupt is handled within `_STRETCH_SECONDS`.

    Python handles a signal just before a wait only when the wait ends.
    """

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the event is set; False if it is not after `timeout` seconds."""
        left = threading.TIMEOUT_MAX if timeout is None else timeout
        while left > _STRETCH_SECONDS:
            if super().wait(_STRETCH_SECONDS):
                return True
            left -= _STRETCH_SECONDS
        return super().wait(left)


class Baton:
    """The hand-over of control between rank threads during one run."""

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
        """State of the process that each rank has for itself; put in place in this order."""
        self._waiting: dict[int, tuple[Awaited, str]] = {}
        self._timeouts = _Timeouts()
        self._running = set(range(len(gates)))
        self._fruitless_polls = 0

    def start(self, timing: Timing) -> None:
        """Make every rank ready and hand over to the first; called by `World.run`'s thread.

        Args:
            timing: Has something due now and then; asked for more when no rank can run.
        """
        self._timing = timing
        for each in self._rank_local:
            each.begin(CALLER)
        for rank in range(len(self.gates)):
            self.schedule.add(rank)
        self._hand_over()

    def restore_caller(self) -> None:
        """Give the calling thread what it had back, after the last rank ended."""
        self._put_in_place(CALLER)

    def enter(self, rank: int) -> None:
        """First thing in a rank thread that was woken: become the holder."""
        self._put_in_place(rank)
        self.holder = rank
        self.check_alive()

    def advance(self) -> None:
        """Count one more call into the world; to be called first in each.

        Raises:
            WorldFailure: An operation was due, and failed.
        """
        check_not_forked()
        self.check_alive()
        self.log.tick += 1
        self._timing.advance()

    def wait_for(
        self, rank: int, awaited: Awaited, site: str, *, timeout_seconds: float | None = None
    ) -> None:
        """Block `rank` until `awaited` is done, letting others run meanwhile.

        Args:
            rank: World rank.
            awaited: What it waits for.
            site: Where.
            timeout_seconds: How long it may wait in simulated time, which stands still as long as
                any rank can run; None for no time-out.

        Raises:
            TimedOut: No rank could run, and of all time-outs this one was the first to be over.
        """
        self.check_alive()
        if awaited.done:
            return
        awaited.waiters.append(rank)
        self._waiting[rank] = (awaited, site)
        if timeout_seconds is not None:
            self._timeouts.begin(rank, timeout_seconds)
        self._yield(rank)
        error = self._timeouts.end(rank)
        if error is not None:
            raise error

    def poll(self, rank: int, awaited: Awaited, site: str) -> bool:
        """Whether `awaited` is done; if not, let every rank that can run have its turn first."""
        if awaited.done or self.failure is not None:
            return awaited.done
        turns = self.turns
        self.schedule.defer(rank)
        self._waiting[rank] = (awaited, site)
        self._yield(rank)
        self._waiting.pop(rank, None)
        self._fruitless_polls = self._fruitless_polls + 1 if self.turns == turns + 1 else 0
        if self._fruitless_polls > FRUITLESS_POLLS_MAX:
            self._waiting[rank] = (awaited, site)
            self.failure = self._deadlock()
            raise RankEnded
        return awaited.done

    @property
    def turns(self) -> int:
        """Number of turns so far."""
        return len(self.log.turns)

    @property
    def is_held(self) -> bool:
        """Whether the rank whose turn it is runs, and was not only woken."""
        return self.log.turns[-1:] == [self.holder]

    def fail(self, failure: WorldFailure) -> WorldFailure:
        """End the world, whatever the program does with the exception; returns it to be raised."""
        if self.failure is None:
            self.failure = failure
        return failure

    def check_alive(self) -> None:
        """Unwind the calling rank if the world has ended."""
        if self.failure is not None:
            raise RankEnded

    def finish(self, awaited: Awaited) -> None:
        """Make the ranks that wait for `awaited` ready again."""
        for rank in awaited.waiters:
            self._waiting.pop(rank, None)
            self.schedule.add(rank)
        awaited.waiters = []

    def end_rank(self, rank: int, error: BaseException | None) -> None:
        """Last thing in a rank thread: note how it ended and hand over for good."""
        self._running.discard(rank)
        if error is not None and self.failure is None:
            self.failure = _as_failure(rank, error)
        try:
            self._take_out(rank)
        except Exception as raised:  # noqa: BLE001  Nobody else would get the baton.
            self.failure = self.failure or _as_failure(rank, raised)
        self._hand_over()

    def _take_out(self, owner: int) -> None:
        """Save all that a process has once and each rank for itself, as the owner's."""
        for each in self._rank_local:
            each.take_out(owner)

    def _put_in_place(self, owner: int) -> None:
        for each in self._rank_local:
            each.put_in_place(owner, previous=self.holder)

    def _yield(self, rank: int) -> None:
        self._take_out(rank)
        if not self._hand_over(rank):
            self.gates[rank].acquire()
        self.enter(rank)

    def _hand_over(self, rank: int = CALLER) -> bool:
        """Open the next rank's gate; True where that is `rank` itself, whose gate stays shut."""
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
        if self.failure is None:
            try:
                chosen = self.schedule.pick()
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
        # The world has ended: wake the others one by one, so that each unwinds.
        return min(self._running, default=None)

    def _time_out_first(self) -> int | None:
        """Let the time-out be over that is the first; whose turn it is then."""
        rank, seconds = self._timeouts.pass_first()
        deadlock = self._deadlock()
        awaited, _ = self._waiting.pop(rank)
        awaited.waiters.remove(rank)
        self._timeouts.over[rank] = TimedOut(
            awaited.doing, awaited.missing, deadlock, seconds=seconds
        )
        self.schedule.add(rank)
        return self._next_rank()

    def _deadlock(self) -> Deadlock:
        # Many ranks wait for one thing; it is asked once.
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
                calls = calls[:-1]  # It is what the rank waits in, and told as that.
            recent = tuple([record.text for record in calls])
            statuses.append(
                RankStatus(rank=rank, doing=doing, site=site, missing=missing, recent=recent)
            )
        cycle = describe_circle(self._waiting)
        if not cycle:
            cycle = describe_inversion(find_inversion(self.log.collectives))
        return Deadlock(tuple(statuses), cycle=cycle)


def _as_failure(rank: int, error: BaseException) -> WorldFailure:
    if isinstance(error, WorldFailure):
        return error
    if isinstance(error, TimedOut):
        return error.deadlock
    hide_simulator(error)
    return RankFailed(rank, error, "".join(traceback.format_exception(error)))
