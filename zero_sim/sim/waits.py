"""Waits of ranks, and the turns of other ranks meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from zero_sim.sim.call import Call
from zero_sim.sim.failures import TimedOut, WorldFailure
from zero_sim.sim.faults import DueFault
from zero_sim.sim.log import EventLog


class Awaited(Protocol):
    """Anything that a rank can wait for."""

    # `finish` makes the ranks in `waiters` ready, in this order.
    done: bool
    waiters: list[int]

    @property
    def doing(self) -> str:
        """The wait in words."""
        ...

    @property
    def missing(self) -> tuple[int, ...]:
        """World ranks that must act before the wait can end."""
        ...


class Pending(Awaited, Protocol):
    """The wait of an operation's members: a collective, or one half of a message."""

    given_up: TimedOut | None
    """Time-out of a member that stopped waiting. The operation then never completes."""

    @property
    def what(self) -> str:
        """The operation in words, as in `all_gather #3 of group world`."""
        ...

    @property
    def key(self) -> str:
        """Unique name among the operations of a run; for a message it includes the side."""
        ...

    @property
    def size(self) -> int:
        """Number of members."""
        ...

    @property
    def strict(self) -> bool:
        """True to reject calls that gloo accepts and NCCL refuses."""
        ...

    @property
    def full(self) -> bool:
        """True once all members have called."""
        ...

    @property
    def joins(self) -> Pending | None:
        """The other half of a message, if it came first; None once the data has moved."""
        ...

    @property
    def members(self) -> Sequence[Call]:
        """The members' calls in group-rank order; for a message, the send and its receive."""
        ...

    @property
    def due_faults(self) -> Mapping[int, Sequence[DueFault]]:
        """Planned faults in the operation's data, by the member's group rank."""
        ...

    def conclude(self) -> None:
        """Note that the data has moved."""
        ...


class Turns(Protocol):
    """Control over turns, as operations in flight need it. The baton implements it."""

    failure: WorldFailure | None

    @property
    def log(self) -> EventLog:
        """The events of the run."""
        ...

    def advance(self) -> None:
        """Count one call into the world. Each call begins with this."""
        ...

    def check_alive(self) -> None:
        """Unwind the calling rank if the world has ended."""
        ...

    def wait_for(
        self, rank: int, awaited: Awaited, site: str, *, timeout_seconds: float | None = None
    ) -> None:
        """Block `rank` until `awaited` is done, and let others run meanwhile."""
        ...

    def poll(self, rank: int, awaited: Awaited, site: str) -> bool:
        """Return True if `awaited` is done; if not, first give every ready rank a turn."""
        ...

    def finish(self, awaited: Awaited) -> None:
        """Make the ranks that wait for `awaited` ready again."""
        ...

    def fail(self, failure: WorldFailure) -> WorldFailure:
        """End the world even if the program catches the exception. Return it for raising."""
        ...
