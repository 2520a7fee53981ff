"""The handle that torch.distributed gives for an operation in flight."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import Work

from zero_sim.sim.callsite import call_site
from zero_sim.sim.flight import Flight, Flights

if TYPE_CHECKING:
    from zero_sim.sim.baton import Awaited, Baton


class SimWork(Work):
    """One rank's side of an operation; waiting hands the baton on until the operation is done.

    Args:
        baton: The baton of the run.
        rank: World rank.
        operations: What it waits for.
        tensors: What the operations write.
        flights: What the rank has in flight.
        lent: What of it lands once this was waited for.
    """

    def __init__(
        self,
        baton: Baton,
        rank: int,
        operations: Sequence[Awaited],
        tensors: Sequence[Tensor],
        *,
        flights: Flights,
        lent: Sequence[Flight] = (),
    ) -> None:
        super().__init__()
        self._baton = baton
        self._rank = rank
        self._operations = operations
        self._tensors = list(tensors)
        self._flights = flights
        self._lent = lent

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block this rank until the operation is done; a hang is named without any timeout."""
        for operation in self._operations:
            if not operation.done:
                file, line = call_site()
                self._baton.wait_for(self._rank, operation, f"{file}:{line}")
        self._baton.check_alive()
        if self._lent:
            self._land()
        return True

    def _land(self) -> None:
        for flight in self._lent:
            self._flights.land(flight)
        self._lent = ()

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the operation is done; lets the other ranks run before it says no."""
        for operation in self._operations:
            if not operation.done:
                file, line = call_site()
                if not self._baton.poll(self._rank, operation, f"{file}:{line}"):
                    return False
        if self._lent:
            self._land()
        return True

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
        return getattr(self._operations[0], "source", -1)

    _source_rank = source_rank
