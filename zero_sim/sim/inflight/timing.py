"""Timing: when operations read and write their memory. The eager timing does it all at once.

Stages of an operation: each member issues; all members are there; inputs are read; it is performed;
and for each member, outputs are written, then its wait returns (landed). `eager` does all at the
last member's issue. `zero_sim.sim.inflight.late` delays it for `lazy` and `hostile`. A correct
program has the same bits under all timings, because it may rely on nothing between issue and wait.
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
    """One operation from the side of a rank that waits for it."""

    @property
    def awaited(self) -> Pending:
        """The rank's wait."""
        ...

    @property
    def record(self) -> int:
        """Index of its record in the log."""
        ...

    @property
    def buffers(self) -> Sequence[InFlightBuffer]:
        """The rank's buffers in flight for it."""
        ...

    @property
    def written(self) -> bool:
        """True if its outputs are in the rank's memory."""
        ...

    def start_wait(self) -> None:
        """Note that the rank begins to wait."""
        ...

    def poll(self) -> None:
        """Note that the rank polled and got False."""
        ...

    def admits(self) -> bool:
        """Return True if a poll of the performed operation may return True."""
        ...

    def land(self) -> None:
        """End the rank's wait: the outputs are there and the rank owns its memory again."""
        ...


class Timing(Protocol):
    """Policy for when the operations of one run read and write."""

    def issue(self, awaited: Pending, call: Call, *, rank: int, member: int, record: int) -> RankOp:
        """Add a member's call.

        Args:
            awaited: The member's wait, which already contains the call.
            call: The member's side.
            rank: World rank of the member.
            member: Group rank of the member; for messages 0 for a send, 1 for a receive.
            record: Index of the call's record in the log.

        Raises:
            WorldFailure: The memory is lent already, or the operation was performed and failed.
        """
        ...

    def advance(self) -> None:
        """Do what is due after one more call into the world.

        Raises:
            WorldFailure: A due action failed.
        """
        ...

    def force(self, *, running: bool) -> bool:
        """Perform an operation because no rank can run.

        Args:
            running: True if a rank has not ended. After all have ended, the rest is performed too.

        Returns:
            True if one was performed. Otherwise nothing here can make a rank ready.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class EagerOp:
    """An operation with eager timing, which leaves nothing to do after the last issue."""

    awaited: Pending
    record: int
    buffers: Sequence[InFlightBuffer] = ()

    @property
    def written(self) -> bool:
        """True once it was performed; `RankOp.written`."""
        return self.awaited.done

    def start_wait(self) -> None:
        """Do nothing; `RankOp.start_wait`."""

    def poll(self) -> None:
        """Do nothing; `RankOp.poll`."""

    def admits(self) -> bool:
        """Return True; `RankOp.admits`."""
        return True

    def land(self) -> None:
        """Do nothing; `RankOp.land`."""


class Eager:
    """Performs each operation when its last member issues it.

    Args:
        order: Order model of the reductions.
        turns: Wakes waiting ranks.
        buffers: Each rank's buffers in flight, by world rank.
        races: True if the run has race detectors, which need the lent memory.
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
            # Inference mode also writes tensors that were made in it, and records nothing for
            # autograd.
            with aside(self._races), torch.inference_mode():
                perform(
                    awaited.members,
                    self._order,
                    due_faults=awaited.due_faults,
                    strict=awaited.strict,
                )
            # A message has two waits, one for each half.
            for each in (awaited, awaited.joins):
                if each is not None:
                    each.conclude()
                    self._turns.finish(each)
        # Writing a sparse tensor replaces its memory, so there is nothing to lend.
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
        """Do nothing, because nothing is ever due; `Timing.advance`."""

    def force(self, *, running: bool) -> bool:
        """Return False, because nothing is left to perform; `Timing.force`."""
        return False


def aside(races: bool) -> AbstractContextManager[object]:
    """Return a context for tensor operations that do not count as the program's.

    Args:
        races: True if the run has race detectors.
    """
    # One shared nullcontext without detectors, because this runs at every operation.
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
        due_faults: Planned faults in the data, by the member's group rank.
        strict: True if memory of several outputs has undefined content.
    """
    if due_faults:
        perform_with_faults(calls, order, due_faults=due_faults)
    else:
        PERFORM[calls[0].kind](calls, order)
    # See `in_flight_buffers`, [Note: one scratch for several outputs].
    for call in calls if strict else ():
        for index in undefined_outputs(call) if len(call.outputs) > 1 else ():
            poison(call.outputs[index])
    # The results must be complete before other ranks' streams use them.
    finish_streams(tensor for call in calls for tensor in (*call.inputs, *call.outputs))
