"""Everything that lives for one run of a program on a world."""

from __future__ import annotations

from dataclasses import dataclass, field

from zero_sim.sim.baton import Baton
from zero_sim.sim.failures import ContractViolation, WorldFailure
from zero_sim.sim.faults import Injector
from zero_sim.sim.flight import Flights
from zero_sim.sim.groups import GroupBook
from zero_sim.sim.inversions import inversion_error
from zero_sim.sim.log import EventLog
from zero_sim.sim.order import Order
from zero_sim.sim.promises import Promises


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Run:
    """One program, on its way or over."""

    baton: Baton
    log: EventLog
    injector: Injector
    order: Order
    flights: list[Flights]
    """What each rank has lent and not waited for, by rank."""
    races: bool
    book: GroupBook = field(default_factory=GroupBook)
    promises: Promises = field(default_factory=Promises)

    def fail(self, failure: WorldFailure) -> WorldFailure:
        """End the world; a violation of the contract is told the last calls of its ranks."""
        if isinstance(failure, ContractViolation):
            failure.history = self.log.history(
                tuple(dict.fromkeys((failure.other_rank, failure.rank)))
            )
        return self.baton.fail(failure)

    def check_ended(self, *, group_count: int) -> None:
        """Check what only shows when all ranks have returned.

        Args:
            group_count: How many groups there were.
        """
        if self.baton.failure is not None:
            return
        failure = self.promises.broken()
        if failure is None and group_count > 1:
            failure = inversion_error(self.log.collectives)
        if failure is not None:
            self.fail(failure)
