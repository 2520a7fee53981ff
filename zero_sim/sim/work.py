"""The handle that torch.distributed gives for an operation in flight."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import Work

from zero_sim.sim.callsite import call_site

if TYPE_CHECKING:
    from zero_sim.sim.baton import Awaited, Baton
    from zero_sim.sim.promises import Promise


class SimWork(Work):
    """One rank's side of an operation; waiting hands the baton on until the operation is done."""

    _promises: Sequence[Promise] = ()

    def __init__(
        self, baton: Baton, rank: int, operations: Sequence[Awaited], tensors: Sequence[Tensor]
    ) -> None:
        super().__init__()
        self._baton = baton
        self._rank = rank
        self._operations = operations
        self._tensors = list(tensors)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block this rank until the operation is done; a hang is named without any timeout."""
        for operation in self._operations:
            if not operation.done:
                file, line = call_site()
                self._baton.wait_for(self._rank, operation, f"{file}:{line}")
        self._baton.check_alive()
        self._keep_promises()
        return True

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
        self._keep_promises()
        return True

    def promise(self, promises: Sequence[Promise]) -> None:
        """Be the work that must be waited for, or seen done, before the rank's program returns."""
        self._promises = promises

    def _keep_promises(self) -> None:
        for promise in self._promises:
            promise.keep()
        self._promises = ()

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
