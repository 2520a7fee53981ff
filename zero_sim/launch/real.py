"""One rank of a real backend: its process groups, and a side channel that uses none of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zero_sim.errors import EnvironmentProblem
from zero_sim.launch.folding import folding_backend

BACKENDS = ("gloo", "nccl")


class RealRank:
    """This process as a rank that runs one program after another.

    Args:
        backend: `gloo` or `nccl`.
        rank: Its place among all processes.
        store: Shared by all processes; the side channel, and how groups find their members.
        timeout_seconds: How long a collective may take before the backend gives up.

    Raises:
        EnvironmentProblem: This torch has no such backend.
    """

    def __init__(
        self, *, backend: str, rank: int, store: dist.Store, timeout_seconds: float = 600.0
    ) -> None:
        available = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
        if not available.get(backend, False):
            have = [name for name, there in available.items() if there]
            raise EnvironmentProblem(
                f"expected a torch with backend {backend!r}, got one with {have}. "
                "Try `zero-sim doctor`."
            )
        self.backend = backend
        self.rank = rank
        self.store = store
        self.timeout_seconds = timeout_seconds
        self._open: tuple[int, str] | None = None
        self._number = -1
        self._exchanges = 0

    def begin(self, number: int) -> None:
        """Start on a program that all processes call by the same number.

        Args:
            number: Different from all before. What ranks tell each other about one program cannot
                be taken for what they tell about another.
        """
        self._number = number
        self._exchanges = 0

    @contextmanager
    def world(self, size: int, *, order: str | None = None, order_seed: int = 0) -> Iterator[None]:
        """A default group of the first `size` processes, for one program.

        It is kept for the next program of that size if this one ended well everywhere and made no
        further groups: connecting anew takes longer than a small case.

        Args:
            size: Number of ranks; this process has to be one of them.
            order: Order in which reductions add, see `zero_sim.launch.folding`; None for whatever
                the backend itself does.
            order_seed: What that order draws from, if it draws.
        """
        name = self.backend
        if order is not None:
            name = folding_backend(self.backend, order, seed=order_seed)
        if self._open != (size, name):
            self.leave()
            dist.init_process_group(
                name,
                store=dist.PrefixStore(f"{self._number}/{self._exchanges}/{size}", self.store),
                rank=self.rank,
                world_size=size,
                timeout=timedelta(seconds=self.timeout_seconds),
            )
            self._open = (size, name)
        try:
            yield
        except BaseException:
            # Others may sit in a collective for ever: nobody is waited for, and who comes reads it.
            self._tell({"clean": False})
            self.leave()
            raise
        clean = len(dist.distributed_c10d._world.pg_map) == 1
        if not all(told["clean"] for told in self.exchange({"clean": clean}, size=size)):
            self.leave()

    def exchange(self, what: Any, *, size: int) -> list[Any]:
        """Tell all ranks something and hear the same from each; no process group takes part.

        Args:
            what: Anything that can be written as JSON.
            size: Number of ranks that take part, this one among them.

        Returns:
            What each rank told, in rank order.
        """
        key = self._tell(what)
        return [json.loads(self.store.get(f"{key}/{rank}")) for rank in range(size)]

    def leave(self) -> None:
        """Destroy every group of this process."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self._open = None

    def _tell(self, what: Any) -> str:
        key = f"told/{self._number}/{self._exchanges}"
        self._exchanges += 1
        self.store.set(f"{key}/{self.rank}", json.dumps(what))
        return key
