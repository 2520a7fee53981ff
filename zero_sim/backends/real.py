"""A rank's process groups on a real backend."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zero_sim.backends.folding import folding_backend
from zero_sim.backends.side_channel import SideChannel
from zero_sim.backends.transports import find_transport

# Limit for connecting and NCCL's first call. Until then the process counts as alive.
_SET_UP_SECONDS = 300.0


class RealRank:
    """This process as a rank, for one program after another.

    Args:
        backend: `gloo` or `nccl`.
        rank: Rank among all processes.
        store: Store shared by all processes, for the side channel and group set-up.
        timeout_seconds: The backend's time limit for a collective.

    Raises:
        EnvironmentProblem: This machine lacks the backend.
    """

    def __init__(
        self, *, backend: str, rank: int, store: dist.Store, timeout_seconds: float = 600.0
    ) -> None:
        self.transport = find_transport(backend)
        self.transport.check()
        self.backend = backend
        self.rank = rank
        self.store = store
        self.timeout_seconds = timeout_seconds
        self._open: tuple[int, str] | None = None
        self.channel = SideChannel(rank=rank, store=store)
        self.last_words = ""
        """Reason why this rank gave up on the program; empty if it did not."""
        self._set_up_by = 0.0
        """Deadline for connecting."""
        self.memory: dict[Any, Any] = {}
        """Results for later programs, equal on all processes."""
        self.is_spoilt = False
        """True if this process may be unusable for another program."""

    @property
    def is_setting_up(self) -> bool:
        """True while connecting, which is slow the first time and gives no sign of life."""
        return time.monotonic() < self._set_up_by

    def begin(self, number: int) -> None:
        """Start a program. Its number is the same on all processes; see `SideChannel`."""
        self.channel.begin(number)
        self.last_words = ""

    @contextmanager
    def world(
        self, size: int, *, about: str = "", order: str | None = None, order_seed: int = 0
    ) -> Iterator[None]:
        """Open a default group of the first `size` processes, for one program.

        If the program succeeds on all ranks and creates no other groups, the next program of this
        size reuses the group, because connecting takes longer than a small case.

        Args:
            size: Number of ranks, including this process. Other processes call `leave`.
            about: Name of the group, if a program opens several.
            order: Order in which reductions add, see `zero_sim.backends.folding`; None for the
                backend's own.
            order_seed: Seed of an order that draws.
        """
        name = self.transport.torch_name
        if order is not None:
            name = folding_backend(self.backend, order, seed=order_seed)
        # Otherwise reuse the last program's group.
        if self._open != (size, name):
            self._join(name, size=size, about=about)
            self._open = (size, name)
        try:
            yield
        except BaseException:
            # Other ranks may hang in a collective, so do not wait. They will read this message.
            self.channel.send(False, about=f"left {about}")
            self.leave(abort=True)
            raise
        # True if the default group is the only group.
        clean = len(dist.distributed_c10d._world.pg_map) == 1
        received = self.channel.exchange(clean, size=size, about=f"left {about}")
        # All ranks must decide alike: all keep the group, or none does.
        if not all(received):
            self.leave()

    def _join(self, backend: str, *, size: int, about: str) -> None:
        """Connect to the other ranks, and return when all ranks are connected.

        A rank that left earlier would cut off ranks that still connect.
        """
        self.leave()
        self._set_up_by = time.monotonic() + _SET_UP_SECONDS
        try:
            dist.init_process_group(
                backend,
                # A unique prefix, because an earlier group of this name may have left keys.
                store=dist.PrefixStore(f"{self.channel.number}/{about}/{size}", self.store),
                rank=self.rank,
                world_size=size,
                timeout=timedelta(seconds=self.timeout_seconds),
                device_id=self.transport.bound_device,
            )
            self.transport.warm_up()
        except BaseException:
            # Other ranks may wait for this message.
            self.channel.withdraw([f"joined {about}"])
            self.leave(abort=True)
            raise
        finally:
            self._set_up_by = 0.0
        try:
            self.channel.exchange(True, size=size, about=f"joined {about}")
        except BaseException:
            self.leave(abort=True)
            raise

    def leave(self, *, abort: bool = False) -> None:
        """Destroy all groups of this process.

        Args:
            abort: True if a pending operation may never end.
        """
        if abort:
            # NCCL may leave this process unusable.
            self.is_spoilt = self.transport.renews
            self.transport.abort()
        elif dist.is_initialized():
            dist.destroy_process_group()
        self._open = None
