"""Waits: what a rank can wait for, and who lets the other ranks run meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from zero_sim.sim.call import Call
from zero_sim.sim.failures import TimedOut, WorldFailure
from zero_sim.sim.faults import DueFault
from zero_sim.sim.log import EventLog


class Awaited(Protocol):
    """Something a rank can wait for."""

    done: bool
    waiters: list[int]

    @property
    def doing(self) -> str:
        """The wait in words."""
        ...

    @property
    def missing(self) -> tuple[int, ...]:
        """World ranks that have to act before it is done."""
        ...


class Pending(Awaited, Protocol):
    """What the members of an operation wait for: a collective, or their half of a message."""

    given_up: TimedOut | None
    """What a member got that does not wait for it any more: it never comes to an end."""

    @property
    def what(self) -> str:
        """The operation in words, as in `all_gather #3 of group world`."""
        ...

    @property
    def key(self) -> str:
        """Names it, and for a message the side, among the operations of a run."""
        ...

    @property
    def size(self) -> int:
        """Number of members."""
        ...

    @property
    def strict(self) -> bool:
        """True if what gloo accepts and NCCL refuses is an error."""
        ...

    @property
    def full(self) -> bool:
        """Whether all members are there."""
        ...

    @property
    def joins(self) -> Pending | None:
        """For a message whose other half was there first, that half, until the data has moved."""
        ...

    @property
    def members(self) -> Sequence[Call]:
        """The members' calls in group-rank order; a send and its receive."""
        ...

    @property
    def due_faults(self) -> Mapping[int, Sequence[DueFault]]:
        """Planned faults that act on its data, by the member's place."""
        ...

    def conclude(self) -> None:
        """Note that the data has moved."""
        ...


class Turns(Protocol):
    """Who hands control from rank to rank, as operations in flight need it: the baton."""

    failure: WorldFailure | None

    @property
    def log(self) -> EventLog:
        """The events of the run."""
        ...

    def advance(self) -> None:
        """Count one more call into the world; to be called first in each."""
        ...

    def check_alive(self) -> None:
        """Unwind the calling rank if the world has ended."""
        ...

    def wait_for(
        self, rank: int, awaited: Awaited, site: str, *, timeout_seconds: float | None = None
    ) -> None:
        """Block `rank` until `awaited` is done, letting others run meanwhile."""
        ...

    def poll(self, rank: int, awaited: Awaited, site: str) -> bool:
        """Whether `awaited` is done; if not, let every rank that can run have its turn first."""
        ...

    def finish(self, awaited: Awaited) -> None:
        """Make the ranks that wait for `awaited` ready again."""
        ...

    def fail(self, failure: WorldFailure) -> WorldFailure:
        """End the world, whatever the program does with the exception; returns it to be raised."""
        ...
