"""Timing: when the operations of a run read and write; the eager one does it all at once.

Each operation goes through: issue by each member, all members there, inputs read, performed, and
for each member: outputs written, landed (its own wait returned). `eager` does all at the last
member's issue. How `lazy` and `hostile` put it off is in `zero_sim.sim.inflight.late`. A correct
program has the same bits under all, since it may count on nothing between issue and wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from zero_sim.sim.call import SPARSE, Call
from zero_sim.sim.comm.collectives import PERFORM
from zero_sim.sim.comm.planned_faults import perform_with_faults
from zero_sim.sim.faults import DueFault
from zero_sim.sim.in_flight_buffers import InFlightBuffer, InFlightBuffers
from zero_sim.sim.inflight.poison import poison
from zero_sim.sim.inflight.races import unwatched
from zero_sim.sim.inflight.snapshots import buffers_of
from zero_sim.sim.order import Order
from zero_sim.sim.roles import undefined_outputs
from zero_sim.sim.streams import finish_streams
from zero_sim.sim.waits import Pending, Turns

_AS_IT_IS = nullcontext()


class RankOp(Protocol):
    """One operation as the rank that waits for it has it."""

    @property
    def awaited(self) -> Pending:
        """What is waited for."""
        ...

    @property
    def record(self) -> int:
        """Index of its record in the log."""
        ...

    @property
    def buffers(self) -> Sequence[InFlightBuffer]:
        """What the rank has in flight for it."""
        ...

    @property
    def written(self) -> bool:
        """True if its outputs are in the rank's memory."""
        ...

    def start_wait(self) -> None:
        """The rank begins to wait for it."""
        ...

    def poll(self) -> None:
        """The rank asked whether it is done, and was told no."""
        ...

    def admits(self) -> bool:
        """Whether a rank that asks is told that it is done, once it is."""
        ...

    def land(self) -> None:
        """The rank's wait returns: its outputs are there and its memory is its own again."""
        ...


class Timing(Protocol):
    """When the operations of one run read and write."""

    def issue(self, awaited: Pending, call: Call, *, rank: int, member: int, record: int) -> RankOp:
        """Take a member's call.

        Args:
            awaited: What the member waits for, which knows the call already.
            call: Its side.
            rank: Its world rank.
            member: Its group rank; 0 for a send, 1 for a receive.
            record: Index of its record in the log.

        Raises:
            WorldFailure: The memory is lent already, or the operation was performed and failed.
        """
        ...

    def advance(self) -> None:
        """One more call into the world was made: do what is due.

        Raises:
            WorldFailure: Something that was due failed.
        """
        ...

    def force(self, *, running: bool) -> bool:
        """No rank can run: perform an operation.

        Args:
            running: Whether any rank has not ended. Once all have, what is left is performed too.

        Returns:
            Whether one was performed; if not, nothing here can make a rank able to run.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class EagerOp:
    """An operation under the eager timing: once all members are there nothing is left to do."""

    awaited: Pending
    record: int
    buffers: Sequence[InFlightBuffer] = ()

    @property
    def written(self) -> bool:
        """True once it was performed; `RankOp.written`."""
        return self.awaited.done

    def start_wait(self) -> None:
        """Nothing to do; `RankOp.start_wait`."""

    def poll(self) -> None:
        """Nothing to do; `RankOp.poll`."""

    def admits(self) -> bool:
        """Always; `RankOp.admits`."""
        return True

    def land(self) -> None:
        """Nothing to do; `RankOp.land`."""


class Eager:
    """Carries out each operation when its last member issues it.

    Args:
        order: Order model of the reductions.
        turns: Makes those ready that wait.
        buffers: What each rank has in flight, by world rank.
        races: Whether somebody watches what is lent.
    """

    def __init__(
        self, *, order: Order, turns: Turns, buffers: Sequence[InFlightBuffers], races: bool
    ) -> None:
        self._order = order
        self._turns = turns
        self._buffers = buffers
        self._races = races

    def issue(self, awaited: Pending, call: Call, *, rank: int, member: int, record: int) -> RankOp:
        """Perform the operation if all members are there; `Timing.issue`."""
        if awaited.full:
            with aside(self._races), torch.inference_mode():
                perform(
                    awaited.members,
                    self._order,
                    due_faults=awaited.due_faults,
                    strict=awaited.strict,
                )
            for each in (awaited, awaited.joins):
                if each is not None:
                    each.conclude()
                    self._turns.finish(each)
        # A sparse tensor's memory is made anew by what is written to it, so nothing can be lent.
        if not self._races or call.kind == SPARSE:
            return EagerOp(awaited, record)
        buffers = buffers_of(
            call,
            what=awaited.what,
            group_rank=member,
            group_size=awaited.size,
            strict=awaited.strict,
        )
        for buffer in buffers:
            self._buffers[rank].add(buffer)
        return EagerOp(awaited, record, buffers)

    def advance(self) -> None:
        """Nothing is ever due; `Timing.advance`."""

    def force(self, *, running: bool) -> bool:
        """Nothing is left undone that could be performed; `Timing.force`."""
        return False


def aside(races: bool) -> AbstractContextManager[object]:
    """A context whose tensor operations no race detector charges to the program.

    Args:
        races: Whether there is one in this run.
    """
    return unwatched() if races else _AS_IT_IS


def perform(
    calls: Sequence[Call],
    order: Order,
    *,
    due_faults: Mapping[int, Sequence[DueFault]],
    strict: bool,
) -> None:
    """Move the data of an operation.

    Args:
        calls: The members' calls in group-rank order; a send and its receive.
        order: Order model of the reductions.
        due_faults: Planned faults that act on the data, by the member's group rank.
        strict: Whether memory that is several outputs has undefined content.
    """
    if due_faults:
        perform_with_faults(calls, order, due_faults=due_faults)
    else:
        PERFORM[calls[0].kind](calls, order)
    for call in calls if strict else ():
        for index in undefined_outputs(call) if len(call.outputs) > 1 else ():
            poison(call.outputs[index])
    finish_streams(tensor for call in calls for tensor in (*call.inputs, *call.outputs))
