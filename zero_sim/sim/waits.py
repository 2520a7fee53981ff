"""Protocols for ranks' waits, and for the turns of other ranks meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from zero_sim.sim.call import Call
from zero_sim.sim.failures import TimedOut, WorldFailure
from zero_sim.sim.faults import DueFault
from zero_sim.sim.log import EventLog


class Awaited(Protocol):
    """Anything that a rank can wait for."""

    # `finish` makes the ranks in `waiters` ready in order.
    done: bool
    waiters: list[int]

    @property
    def doing(self) -> str:
        """Description of the wait, for the deadlock table."""
        ...

    @property
    def missing(self) -> tuple[int, ...]:
        """World ranks that must act before the wait can end."""
        ...


class Pending(Awaited, Protocol):
    """An operation for which members wait: a collective, or a send or receive."""

    given_up: TimedOut | None
    """Time-out of a member that gave up. Then the operation never completes."""

    @property
    def what(self) -> str:
        """Name of the operation, such as `all_gather #3 of group world`."""
        ...

    @property
    def key(self) -> str:
        """Unique name in a run, independent of the schedule."""
        ...

    @property
    def size(self) -> int:
        """Number of members."""
        ...

    @property
    def strict(self) -> bool:
        """True if the group refuses calls that gloo accepts but NCCL does not."""
        ...

    @property
    def full(self) -> bool:
        """True once all members have called."""
        ...

    @property
    def joins(self) -> Pending | None:
        """The other half of a message if it came first; None once the data has moved."""
        ...

    @property
    def members(self) -> Sequence[Call]:
        """The members' calls in group-rank order; for a message, the send and its receive."""
        ...

    @property
    def due_faults(self) -> Mapping[int, Sequence[DueFault]]:
        """Planned faults in the operation's data, by group rank."""
        ...

    def conclude(self) -> None:
        """Note that the data has moved."""
        ...


class Turns(Protocol):
    """The baton's interface for operations in flight."""

    failure: WorldFailure | None

    @property
    def log(self) -> EventLog:
        """The run's events."""
        ...

    def advance(self) -> None:
        """Count a call into the world. Each call begins with this."""
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
        """Make the waiting ranks ready again."""
        ...

    def fail(self, failure: WorldFailure) -> WorldFailure:
        """End the world, even if the program catches the failure. Return it for raising."""
        ...
