"""Transports by name, and gloo, for any number of ranks on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName

from zero_sim.backends.cuda import Cuda
from zero_sim.backends.nccl import Nccl
from zero_sim.backends.transport import Membership, Transport
from zero_sim.errors import EnvironmentProblem


class Gloo:
    """gloo as a transport."""

    name = "gloo"
    own_order = "gloo"
    device_type = "cpu"
    torch_name = "gloo"
    device: torch.device | None = None
    bound_device: torch.device | None = None
    lacks: tuple[str, ...] = ("PREMUL_SUM",)
    renews = False
    processes_max: int | None = None

    def check(self) -> None:
        """Check that this torch was built with gloo."""
        if not dist.is_gloo_available():
            raise EnvironmentProblem(
                f"expected a torch with gloo, got torch {torch.__version__}, which was built "
                "without it. Try another build, or `zero-sim doctor`."
            )

    def prepare(self, environment: MutableMapping[str, str]) -> None:
        """Make torch's Flight Recorder keep the last calls, for reports of hangs."""
        environment.setdefault("TORCH_FR_BUFFER_SIZE", "200")

    def take_device(self, local_rank: int) -> None:
        """Do nothing, because the CPU is shared."""

    def make_group(self, membership: Membership) -> Any:
        """Return a `ProcessGroupGloo`."""
        store, rank, size = membership.store, membership.rank, len(membership.ranks)
        group = dist.ProcessGroupGloo(store, rank, size, membership.timeout)
        group.options.global_ranks_in_group = list(membership.ranks)
        group.options.group_name = GroupName(membership.name)
        return group

    def warm_up(self) -> None:
        """Do nothing, because groups connect at their creation."""

    def abort(self) -> None:
        """Destroy all groups. With gloo this does not wait."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def identity(self) -> Mapping[str, str]:
        """Return versions. They must be equal, because each rank replays the work of all ranks."""
        return {
            "torch": torch.__version__,
            "cpu kernels": str(torch.backends.cpu.get_cpu_capability()),
        }

    def notes(self, process_count: int) -> Sequence[str]:
        """Return no notes."""
        return ()


# Made on first use, so that a process with gloo never touches CUDA.
_MAKERS: dict[str, Callable[[], Transport]] = {"gloo": Gloo, "nccl": lambda: Nccl(Cuda())}
_MADE: dict[str, Transport] = {}


def find_transport(name: str) -> Transport:
    """Return a transport by name, one object per process.

    Raises:
        EnvironmentProblem: There is no such transport.
    """
    if name not in _MAKERS:
        raise EnvironmentProblem(
            f"expected the backend to be one of {', '.join(_MAKERS)}, got {name!r}. "
            "Try `zero-sim doctor`."
        )
    if name not in _MADE:
        _MADE[name] = _MAKERS[name]()
    return _MADE[name]


def put_transport(name: str, make: Callable[[], Transport]) -> None:
    """Replace a transport in this process, for example by a stand-in."""
    _MAKERS[name] = make
    # The next lookup makes the new one.
    _MADE.pop(name, None)


def local_rank_of(environment: Mapping[str, str] = os.environ, *, rank: int) -> int:
    """Return the local rank that a launcher set; by default the rank."""
    return int(environment.get("LOCAL_RANK", rank))
