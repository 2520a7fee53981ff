"""The handle that torch.distributed gives for an operation in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from zero_sim.sim.callsite import call_site, site_of
from zero_sim.sim.comm.plain import count_holders
from zero_sim.sim.comm.timeouts import after_another
from zero_sim.sim.failures import TimedOut
from zero_sim.sim.in_flight import Flights
from zero_sim.sim.inflight.timing import Leg
from zero_sim.sim.waits import Pending, Turns


class SimWork(Work):
    """One rank's side of an operation; waiting hands the baton on until the operation is done.

    Args:
        baton: The baton of the run.
        rank: World rank.
        legs: The operations, more than one where they were coalesced.
        tensors: What they write.
        flights: What the rank has lent.
    """

    _owed: Sequence[int] = ()
    """Indices of the records that must be waited for, or seen done, before the program returns."""
    timeout_seconds: float | None = None
    """How long a wait for it may take, in simulated time."""
    is_of_torch = False
    """Whether torch's own code has it, and not a program."""

    def __init__(
        self,
        baton: Turns,
        rank: int,
        legs: Sequence[Leg],
        tensors: Sequence[Tensor],
        flights: Flights,
    ) -> None:
        super().__init__()
        self._baton = baton
        self._rank = rank
        self._legs = legs
        self._tensors = list(tensors)
        self._flights = flights
        self._landed = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block this rank until the operation is done; a hang is named without any timeout.

        Raises:
            TimedOut: It is a barrier, and this rank or another one has given it up.
        """
        baton = self._baton
        baton.advance()
        if not self._landed:
            for leg in self._legs:
                baton.log.note(self._rank, "wait", leg.record)
        for leg in self._legs:
            leg.start_wait()
            if not leg.awaited.done and leg.awaited.given_up is None:
                self._wait_for(leg.awaited)
            if leg.awaited.given_up is not None:
                self._settle()
                raise after_another(leg.awaited.given_up)
        baton.check_alive()
        self._land()
        return True

    def _wait_for(self, awaited: Pending) -> None:
        file, line = call_site()
        seconds = self.timeout_seconds
        try:
            self._baton.wait_for(self._rank, awaited, site_of(file, line), timeout_seconds=seconds)
        except TimedOut as error:
            awaited.given_up = error
            self._baton.finish(awaited)
            self._settle()
            raise

    def _land(self) -> None:
        if self._landed:
            return
        self._landed = True
        baton = self._baton
        for leg in self._legs:
            leg.land()
            for flight in leg.flights:
                self._flights.land(flight)
            baton.log.note(self._rank, "land", leg.record)
        self._settle()

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the operation is done; lets the other ranks run before it says no.

        A yes counts as a wait.
        """
        if self._landed:
            return True
        baton = self._baton
        baton.advance()
        for leg in self._legs:
            if leg.awaited.done:
                continue
            file, line = call_site()
            if baton.poll(self._rank, leg.awaited, site_of(file, line)):
                continue
            leg.poll()
            if not leg.awaited.done:
                return False
        for leg in self._legs:
            if not leg.admits():
                return False
        self._land()
        return True

    def owe(self) -> None:
        """Be the work that must be waited for, or seen done, before the rank's program returns."""
        self._owed = [leg.record for leg in self._legs]
        self._baton.log.unwaited.update(self._owed)

    def __del__(self) -> None:
        # torch itself drops works whose results nobody can read, and no program can change that.
        if self._owed and self.is_of_torch and not self._is_result_held():
            self._settle()

    def _is_result_held(self) -> bool:
        """Whether the program still has memory, other than none, that the operation writes."""
        flights = [flight for leg in self._legs for flight in leg.flights]
        own = {id(tensor): tensor for tensor in self._tensors}
        own |= {id(flight.tensor): flight.tensor for flight in flights}
        own |= {id(flight.whole): flight.whole for flight in flights if flight.whole is not None}
        of_storage = Counter(tensor.untyped_storage()._cdata for tensor in own.values())
        return any(
            tensor.numel() and count_holders(tensor) > of_storage[tensor.untyped_storage()._cdata]
            for tensor in self._tensors
        )

    def _settle(self) -> None:
        if self._owed:
            self._baton.log.unwaited.difference_update(self._owed)
            self._owed = ()

    def is_success(self) -> bool:
        """Whether the operation is done: one that fails ends the world instead."""
        return self.is_completed()

    def get_future(self) -> torch.futures.Future:
        """A completed future of the tensors.

        Waits first: torch's C++ code (the reducer of DistributedDataParallel) blocks on the future
        without coming back to Python, where it could not hand the baton on.
        """
        self.wait()
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self._tensors)
        return future

    def result(self) -> list[Tensor]:
        """The tensors that the operation writes."""
        return self._tensors

    def source_rank(self) -> int:
        """Group rank that a receive came from."""
        return getattr(self._legs[0].awaited, "source", -1)

    _source_rank = source_rank


def join_works(
    works: Sequence[SimWork],
    *,
    baton: Turns,
    rank: int,
    flights: Flights,
    result: Sequence[Any] | None = None,
) -> SimWork:
    """One work for several of a rank, each of which may still be waited for by itself.

    Args:
        works: Those.
        baton: The baton of the run.
        rank: World rank.
        flights: What the rank has lent.
        result: What it writes, where that is not what they do.
    """
    legs = [leg for work in works for leg in work._legs]
    tensors = [tensor for work in works for tensor in work._tensors]
    joined = SimWork(baton, rank, legs, tensors if result is None else result, flights)
    joined._owed = [record for work in works for record in work._owed]
    return joined
