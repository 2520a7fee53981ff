"""Timing: when operations read and write their memory. Contains the eager timing.

An operation has these stages: each member issues it; inputs are read; it is performed; then, for
each member, outputs are written and the wait returns (the operation has landed). `eager` reads,
performs and writes when the last member issues. `zero_sim.sim.inflight.late` does so later, for
`lazy` and `hostile`. A correct program has the same bits with all timings, because it does not
touch the memory between issue and wait.
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
    """A member's part of an operation."""

    @property
    def awaited(self) -> Pending:
        """The rank's wait."""
        ...

    @property
    def record(self) -> int:
        """Index of the call's record in the log."""
        ...

    @property
    def buffers(self) -> Sequence[InFlightBuffer]:
        """The rank's buffers that this operation uses."""
        ...

    @property
    def written(self) -> bool:
        """True if the outputs are written."""
        ...

    def start_wait(self) -> None:
        """Note that the rank begins to wait."""
        ...

    def poll(self) -> None:
        """Note that a poll returned False."""
        ...

    def admits(self) -> bool:
        """Return True if a poll may return True now. Called after the operation was performed."""
        ...

    def land(self) -> None:
        """Write missing outputs at the end of the wait. The rank owns its memory again."""
        ...


class Timing(Protocol):
    """Decides when a run's operations read and write memory."""

    def issue(self, awaited: Pending, call: Call, *, rank: int, member: int, record: int) -> RankOp:
        """Add a member's call.

        Args:
            awaited: The operation, which already contains the call.
            call: The member's call.
            rank: The member's world rank.
            member: The member's group rank; in a message, 0 for the send and 1 for the receive.
            record: Index of the call's record in the log.

        Raises:
            WorldFailure: The memory is lent already, or the operation failed.
        """
        ...

    def advance(self) -> None:
        """Carry out actions due at this tick.

        Raises:
            WorldFailure: A due action failed.
        """
        ...

    def force(self, *, running: bool) -> bool:
        """Perform an operation because no rank can run.

        Args:
            running: True if any rank has not ended. Then do nothing unless a rank waits for an
                operation.

        Returns:
            False if nothing was performed, so no rank can become ready.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class EagerOp:
    """A `RankOp` with eager timing, which has nothing to do after the last issue."""

    awaited: Pending
    record: int
    buffers: Sequence[InFlightBuffer] = ()

    @property
    def written(self) -> bool:
        """True if the operation was performed."""
        return self.awaited.done

    def start_wait(self) -> None:
        """Do nothing."""

    def poll(self) -> None:
        """Do nothing."""

    def admits(self) -> bool:
        """Return True."""
        return True

    def land(self) -> None:
        """Do nothing."""


class Eager:
    """A `Timing` that performs each operation when its last member issues it.

    If the run has race detectors (`races`), they watch `buffers`, which are indexed by world rank.
    """

    def __init__(
        self, *, order: Order, turns: Turns, buffers: Sequence[InFlightBuffers], races: bool
    ) -> None:
        self._order = order
        self._turns = turns
        self._buffers = buffers
        self._races = races

    def issue(self, awaited: Pending, call: Call, *, rank: int, member: int, record: int) -> RankOp:
        """Perform the operation if all members have called; `Timing.issue`."""
        if awaited.full:
            # Inference mode can also write inference tensors, and records nothing for autograd.
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
        # A write to a sparse tensor replaces its memory, so there is nothing to lend.
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
        """Do nothing, because nothing is ever due."""

    def force(self, *, running: bool) -> bool:
        """Return False, because nothing is left to perform."""
        return False


def aside(races: bool) -> AbstractContextManager[object]:
    """Return `unwatched()` if the run has race detectors (`races`), otherwise a null context."""
    # A shared null context, because this runs at every operation.
    return unwatched() if races else _AS_IT_IS


def perform(
    calls: Sequence[Call],
    order: Order,
    *,
    due_faults: Mapping[int, Sequence[DueFault]],
    strict: bool,
) -> None:
    """Move an operation's data. If `strict`, poison memory that several outputs share.

    `calls` are in group-rank order; for a message, the send and its receive.
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
