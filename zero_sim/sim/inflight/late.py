"""Late timings: `lazy` delays operations as long as waits allow, `hostile` by drawn amounts."""

from __future__ import annotations

import functools
import heapq
import random
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal

import torch

from zero_sim.sim.call import SPARSE, Call
from zero_sim.sim.failures import RankFailed, WorldFailure
from zero_sim.sim.in_flight_buffers import InFlightBuffer, InFlightBuffers
from zero_sim.sim.inflight.races import unwatched
from zero_sim.sim.inflight.snapshots import BufferSnapshots
from zero_sim.sim.inflight.timing import Eager, RankOp, Timing, perform
from zero_sim.sim.order import Order
from zero_sim.sim.streams import finish_streams
from zero_sim.sim.waits import Pending, Turns

_ROUNDS_LATE_MAX = 4
"""Longest drawn delay, in calls into the world per group member."""

_REFUSALS_MAX = 2
"""Largest drawn value of `LatePlan.refusals`."""

TIMINGS = ("eager", "lazy", "hostile")


def build_timing(
    name: str,
    *,
    seed: int,
    order: Order,
    turns: Turns,
    buffers: Sequence[InFlightBuffers],
    races: bool,
) -> Timing:
    """Return the timing with this name, an entry of `TIMINGS`, for a run."""
    eager = Eager(order=order, turns=turns, buffers=buffers, races=races)
    if name == "eager":
        return eager
    return Late(
        hostile=name == "hostile",
        seed=seed,
        order=order,
        turns=turns,
        buffers=buffers,
        eager=eager,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LatePlan:
    """Delays in a member's part of an operation. The defaults are for `lazy`."""

    read_late: bool = True
    """True to read inputs when the operation is performed, False when it is issued."""
    write: Literal["perform", "later", "wait"] = "wait"
    write_after: int = 0
    """Number of calls into the world between performing and writing, with `write = "later"`."""
    let_others_run: bool = True
    """True to pass on the baton at a wait, although the operation could be performed."""
    refusals: int = 0
    """Number of polls that return False although the operation was performed."""


@dataclass(slots=True, kw_only=True, eq=False)
class LateOp:
    """A member's part of an operation; a `RankOp`."""

    awaited: Pending
    rank: int
    record: int
    """Index of the call's record in the log."""
    key: str
    """Unique name, as a seed for draws."""
    snapshots: BufferSnapshots
    plan: LatePlan
    operation: Operation
    timing: Late
    refusals_left: int
    written: bool = False
    landed: bool = False

    @property
    def buffers(self) -> Sequence[InFlightBuffer]:
        """See `RankOp.buffers`."""
        return self.snapshots.buffers

    def start_wait(self) -> None:
        """See `Late.start_wait`."""
        self.timing.start_wait(self)

    def poll(self) -> None:
        """See `Late.poll`."""
        self.timing.poll(self)

    def admits(self) -> bool:
        """Return False for the drawn number of refusals, then True."""
        if self.refusals_left and not self.landed:
            self.refusals_left -= 1
            return False
        return True

    def land(self) -> None:
        """See `Late.land`."""
        self.timing.land(self)


@dataclass(slots=True, kw_only=True, eq=False)
class Operation:
    """A collective, or a send with its receive."""

    awaited: list[Pending] = field(default_factory=list)
    ops: dict[int, LateOp] = field(default_factory=dict)
    """Parts by group rank; in a message, 0 for the send and 1 for the receive."""
    polls_left: int = 0

    @property
    def has_waiter(self) -> bool:
        """True if a rank waits until the operation is performed."""
        return any(awaited.waiters for awaited in self.awaited)


class Late:
    """A `Timing` that performs operations later than `Eager`.

    If `hostile`, delays are drawn; otherwise, they are the longest possible. `eager` performs
    operations that cannot be late. `buffers` are indexed by world rank.
    """

    def __init__(
        self,
        *,
        hostile: bool,
        seed: int,
        order: Order,
        turns: Turns,
        buffers: Sequence[InFlightBuffers],
        eager: Eager,
    ) -> None:
        self._hostile = hostile
        self._seed = seed
        self._order = order
        self._turns = turns
        self._eager = eager
        self._log = turns.log
        self._buffers = buffers
        self._forcing = random.Random(f"{seed}|forcing")
        # Operations that are not performed yet. A message may have two keys.
        self._open: dict[Pending, Operation] = {}
        self._full: dict[Operation, None] = {}
        """Operations that all members have issued, oldest first."""
        self._agenda = _Agenda()
        # Polls of all ranks since the last progress.
        self._idle_polls = 0

    def issue(self, awaited: Pending, call: Call, *, rank: int, member: int, record: int) -> RankOp:
        """Copy a member's inputs and poison its outputs; `Timing.issue`."""
        if call.kind == SPARSE:
            # Sparse tensors have no fixed memory to lend, so they cannot be late.
            return self._eager.issue(awaited, call, rank=rank, member=member, record=record)
        # A message's second half joins the first half's operation.
        operation = self._open.get(awaited.joins or awaited) or Operation()
        if awaited not in operation.awaited:
            operation.awaited.append(awaited)
            self._open[awaited] = operation
        key = f"{self._seed}|{awaited.key}|{member}"
        # See [Note: draws].
        plan = _draw_plan(key, group_size=awaited.size) if self._hostile else LatePlan()
        # An overlap with other memory in flight raises here.
        with _EndingTheWorld(self._turns, rank):
            snapshots = BufferSnapshots(
                call,
                rank=rank,
                what=awaited.what,
                group_rank=member,
                group_size=awaited.size,
                others=self._buffers[rank],
                strict=awaited.strict,
            )
            finish_streams(buffer.tensor for buffer in snapshots.buffers)
        for buffer in snapshots.buffers:
            self._buffers[rank].add(buffer)
        op = operation.ops[member] = LateOp(
            awaited=awaited,
            rank=rank,
            record=record,
            key=key,
            snapshots=snapshots,
            plan=plan,
            operation=operation,
            timing=self,
            refusals_left=plan.refusals,
        )
        self._idle_polls = 0
        if not plan.read_late:
            self._log.note(rank, "read", record)
        if awaited.full:
            self._fill(operation)
        return op

    def advance(self) -> None:
        """Carry out actions due at this tick; `Timing.advance`."""
        self._agenda.do(self._log.tick)

    def start_wait(self, op: LateOp) -> None:
        """Perform the operation at the start of a wait, unless the plan lets others run first.

        Raises:
            WorldFailure: The operation failed.
        """
        self._idle_polls = 0
        if not op.plan.let_others_run:
            self._perform(op.operation)

    def poll(self, op: LateOp) -> None:
        """Note that a poll returned False. After some polls, perform an operation.

        Raises:
            WorldFailure: The operation failed.
        """
        operation = op.operation
        if operation in self._full:
            operation.polls_left -= 1
            if operation.polls_left < 0:
                self._perform(operation)
            return
        # Ranks that poll in turns keep each other ready, so `force` is never called. Perform an
        # operation here, because another rank may wait for it.
        self._idle_polls += 1
        if self._idle_polls > len(self._buffers):
            self._idle_polls = 0
            for waited_for in [full for full in self._full if full.has_waiter][:1]:
                self._perform(waited_for)

    def force(self, *, running: bool) -> bool:
        """Perform the first awaited operation, or a drawn operation if hostile; `Timing.force`."""
        eligible = [full for full in self._full if full.has_waiter or not running]
        if not eligible or self._turns.failure is not None:
            return False
        # If hostile, draw also among operations without a waiting rank. The generator is separate,
        # because these draws must not shift others.
        chosen = self._forcing.choice(list(self._full)) if self._hostile else eligible[0]
        try:
            self._perform(chosen)
        except WorldFailure:
            return False  # The baton has the failure, which need not be this thread's rank's.
        return True

    def land(self, op: LateOp) -> None:
        """End a rank's wait: write missing outputs, and return the memory to the rank.

        Raises:
            InFlightRace: The memory does not have its expected content.
        """
        if op.landed:
            return
        self._idle_polls = 0
        if op.written:
            with _EndingTheWorld(self._turns, op.rank):
                # The last chance to see that the program wrote between issue and wait.
                op.snapshots.check_inputs()
                op.snapshots.check_outputs()
        else:
            self._write(op)
        op.landed = True
        # Free the copies, which are as large as the tensors.
        op.snapshots.forget()

    def _fill(self, operation: Operation) -> None:
        """Note that all members have called, and draw when to perform the operation."""
        self._full[operation] = None
        if not self._hostile:
            return
        draws = random.Random(f"{operation.ops[0].key}|operation")
        horizon = _horizon(len(operation.ops))
        operation.polls_left = draws.randint(0, _REFUSALS_MAX)
        # `forced`: only at a wait, after polls, or if no rank can run.
        when = draws.choice(("at once", "later", "forced"))
        after = draws.randint(1, horizon)
        if when == "at once":
            self._perform(operation)
        elif when == "later":
            self._do_after(after, lambda: self._perform(operation))

    def _perform(self, operation: Operation) -> None:
        """Perform the operation, unless this is done already or a member is missing."""
        if operation not in self._full:
            return
        del self._full[operation]
        self._idle_polls = 0
        # In member order, which does not depend on the schedule. Errors without a rank are
        # attributed to the last member that issued.
        ops = [op for _, op in sorted(operation.ops.items())]
        with _EndingTheWorld(self._turns, list(operation.ops.values())[-1].rank):
            for op in ops:
                if op.plan.read_late:
                    op.snapshots.check_inputs()
                    self._log.note(op.rank, "read", op.record)
            copied = [op.snapshots.copied for op in ops]
            awaited = operation.awaited[0]
            perform(copied, self._order, due_faults=awaited.due_faults, strict=awaited.strict)
        for op in ops:
            self._log.note(op.rank, "perform", op.record)
            if op.plan.write == "perform":
                self._write(op)
            elif op.plan.write == "later":
                self._do_after(op.plan.write_after, functools.partial(self._write, op))
        for awaited in operation.awaited:
            awaited.conclude()
            del self._open[awaited]
            self._turns.finish(awaited)

    def _write(self, op: LateOp) -> None:
        """Write a rank's outputs into its memory, unless this is done already."""
        if op.written or op.landed:
            return
        with _EndingTheWorld(self._turns, op.rank):
            # Check first, because our write would hide changes by the program.
            op.snapshots.check_inputs()
            op.snapshots.check_outputs()
            op.snapshots.write()
            finish_streams(buffer.tensor for buffer in op.snapshots.buffers)
        op.written = True
        self._log.note(op.rank, "write", op.record)

    def _do_after(self, calls: int, action: Callable[[], None]) -> None:
        self._agenda.add(self._log.tick + calls, action)


class _Agenda:
    """Actions by tick. Actions for the same tick keep the order of `add`."""

    def __init__(self) -> None:
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0

    def add(self, tick: int, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._due, (tick, self._count, action))

    def do(self, tick: int) -> None:
        """Carry out actions due at a tick, including actions added meanwhile."""
        while self._due and self._due[0][0] <= tick:
            heapq.heappop(self._due)[2]()


class _EndingTheWorld:
    """Context for work on memory that `rank` owns, in any thread. A failure ends the world."""

    __slots__ = ("_inference", "_rank", "_turns", "_unwatched")

    def __init__(self, turns: Turns, rank: int) -> None:
        self._turns, self._rank = turns, rank
        # Inference mode can also write inference tensors, and records nothing for autograd.
        self._unwatched, self._inference = unwatched(), torch.inference_mode()

    def __enter__(self) -> None:
        self._unwatched.__enter__()
        self._inference.__enter__()

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inference.__exit__(kind, error, trace)
        self._unwatched.__exit__(None, None, None)
        if isinstance(error, WorldFailure):
            raise self._turns.fail(error) from None
        if isinstance(error, Exception):
            text = "".join(traceback.format_exception(error))
            raise self._turns.fail(RankFailed(self._rank, error, text)) from error


def _horizon(group_size: int) -> int:
    """Return a group's longest drawn delay, in calls into the world."""
    return _ROUNDS_LATE_MAX * group_size


# [Note: draws] Draws for a member depend on the seed, the group, the operation's number and the
# member, but not on the schedule. So schedule and timing can vary independently.
def _draw_plan(key: str, *, group_size: int) -> LatePlan:
    draws = random.Random(key)
    return LatePlan(
        read_late=draws.random() < 0.5,
        write=draws.choice(("perform", "later", "wait")),
        write_after=draws.randint(1, _horizon(group_size)),
        let_others_run=draws.random() < 0.5,
        refusals=draws.randint(0, _REFUSALS_MAX),
    )
