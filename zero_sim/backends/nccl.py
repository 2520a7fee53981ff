"""NCCL transport: one rank per GPU, with a pinned summation order.

All calls of CUDA and NCCL are in `Cuda`, for which tests use a stand-in.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zero_sim.backends.cuda import Cuda
from zero_sim.backends.nccl_settings import SHARING, pin, shown
from zero_sim.backends.transport import Membership
from zero_sim.errors import EnvironmentProblem


class Nccl:
    """NCCL as a transport."""

    name = "nccl"
    own_order = "nccl-ring"
    lacks: tuple[str, ...] = ()
    renews = True

    def __init__(self, library: Cuda) -> None:
        self._library = library
        self.device_type = library.device_type
        self.torch_name = library.torch_name
        self.device: torch.device | None = None
        self.bound_device: torch.device | None = None

    @property
    def processes_max(self) -> int | None:
        """One process per GPU; None (any number) if ranks may share GPUs."""
        return None if _may_share() else self._library.device_count()

    def check(self) -> None:
        """Check that torch was built with NCCL and finds a GPU."""
        if not self._library.is_built():
            raise EnvironmentProblem(
                f"expected a torch with NCCL, got torch {torch.__version__}, which was built "
                "without it. Install a CUDA build of torch, and check it with `zero-sim doctor`."
            )
        if not self._library.device_count():
            raise EnvironmentProblem(
                f"expected a GPU that torch {torch.__version__} can use, got none. Try "
                "--backend gloo, or `zero-sim doctor`."
            )

    def prepare(self, environment: MutableMapping[str, str]) -> None:
        """Pin the summation order."""
        pin(environment)

    def take_device(self, local_rank: int) -> None:
        """Take the GPU with the local rank's number, or the only visible GPU."""
        self.check()
        count = self._library.device_count()
        if local_rank >= count > 1 and not _may_share():
            raise EnvironmentProblem(
                f"expected a GPU for local rank {local_rank}, but this machine has {count}. Try "
                f"fewer processes per node, or {SHARING}=1 with NCCL 2.30 or newer."
            )
        # Local ranks exceed the count if each process sees only its GPU, or if ranks share GPUs.
        index = local_rank % count
        self._library.use(index)
        self.device = torch.device(self.device_type, index)
        self.bound_device = self.device if self._library.binds else None

    def make_group(self, membership: Membership) -> Any:
        """Return a `ProcessGroupNCCL` bound to the device."""
        assert self.device is not None
        return self._library.make_group(membership, device=self.device)

    def warm_up(self) -> None:
        """Complete a call of the default group."""
        # The first call includes all slow set-up of NCCL.
        dist.all_reduce(torch.ones(1, device=self.device))
        self._library.synchronize()

    def abort(self) -> None:
        """Abort all communicators, because destroying them waits for kernels that may never end."""
        if dist.is_initialized():
            self._library.abort_all()

    def identity(self) -> Mapping[str, str]:
        """Return GPU model and versions, equal on all processes, and `only`: this process's GPU."""
        assert self.device is not None
        index = self.device.index or 0
        return {
            "torch": torch.__version__,
            "CUDA": self._library.toolkit(),
            "NCCL": ".".join(map(str, self._library.version())),
            "GPU": self._library.device_name(index),
            "only": f"{platform.node()} GPU {self._library.device_id(index)}",
        }

    def notes(self, process_count: int) -> Sequence[str]:
        """Describe NCCL, the GPU and variables that are set."""
        versions = self.identity()
        kinds = f"NCCL {versions['NCCL']}, CUDA {versions['CUDA']} on {versions['GPU']}"
        return (f"{kinds}, {process_count} processes", *shown(os.environ))


def _may_share() -> bool:
    return os.environ.get(SHARING) == "1"


def check_alike(identities: Sequence[Mapping[str, str]]) -> None:
    """Check from the identities of a job's processes, in rank order, that it can be judged.

    Raises:
        EnvironmentProblem: Two processes differ in a version or model, or share a GPU.
    """
    # GPU model and versions decide the bits of matrix products.
    first = identities[0]
    for rank, other in enumerate(identities):
        for what in first:
            if what != "only" and other.get(what) != first[what]:
                raise EnvironmentProblem(
                    f"expected the same {what} for all ranks, because each replays the work of "
                    f"all, got {first[what]!r} for rank 0 and {other.get(what)!r} for rank {rank}. "
                    "Use machines of one kind, with the same packages."
                )
    places: dict[str, int] = {}
    for rank, other in enumerate(identities):
        # Without `only`, as with gloo, processes share their device freely.
        before = places.setdefault(other.get("only", f"rank {rank}"), rank)
        if before != rank and not _may_share():
            raise EnvironmentProblem(
                f"expected a GPU for each rank, got ranks {before} and {rank} on {other['only']}. "
                f"Try fewer processes per node, or {SHARING}=1 with NCCL 2.30 or newer."
            )
