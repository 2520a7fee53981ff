"""Transports by name, one of each in a process; and gloo: any number of ranks, on the CPU."""

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
    """gloo behind the protocol of transports."""

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
        """That this torch was built with it."""
        if not dist.is_gloo_available():
            raise EnvironmentProblem(
                f"expected a torch with gloo, got torch {torch.__version__}, which was built "
                "without it. Try another build, or `zero-sim doctor`."
            )

    def prepare(self, environment: MutableMapping[str, str]) -> None:
        """Let torch's Flight Recorder keep the last calls, which a hang is told with."""
        environment.setdefault("TORCH_FR_BUFFER_SIZE", "200")

    def take_device(self, local_rank: int) -> None:
        """None to take."""

    def make_group(self, membership: Membership) -> Any:
        """A `ProcessGroupGloo`."""
        store, rank, size = membership.store, membership.rank, len(membership.ranks)
        group = dist.ProcessGroupGloo(store, rank, size, membership.timeout)
        group.options.global_ranks_in_group = list(membership.ranks)
        group.options.group_name = GroupName(membership.name)
        return group

    def warm_up(self) -> None:
        """Nothing: connections are there once groups are."""

    def abort(self) -> None:
        """Destroy the groups: gloo waits for nobody."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def identity(self) -> Mapping[str, str]:
        """The kernels that replay the work of all ranks."""
        return {
            "torch": torch.__version__,
            "cpu kernels": str(torch.backends.cpu.get_cpu_capability()),
        }

    def notes(self, process_count: int) -> Sequence[str]:
        """None."""
        return ()


_MAKERS: dict[str, Callable[[], Transport]] = {"gloo": Gloo, "nccl": lambda: Nccl(Cuda())}
_MADE: dict[str, Transport] = {}


def find_transport(name: str) -> Transport:
    """The transport of this process by name, always the same one.

    Raises:
        EnvironmentProblem: There is none of that name.
    """
    if name not in _MAKERS:
        raise EnvironmentProblem(
            f"expected a backend that is one of {', '.join(_MAKERS)}, got {name!r}. "
            "Try `zero-sim doctor`."
        )
    if name not in _MADE:
        _MADE[name] = _MAKERS[name]()
    return _MADE[name]


def put_transport(name: str, make: Callable[[], Transport]) -> None:
    """Put another transport in the place of one, such as a stand-in; in this process alone."""
    _MAKERS[name] = make
    _MADE.pop(name, None)


def local_rank_of(environment: Mapping[str, str] = os.environ, *, rank: int) -> int:
    """Which process of its machine this one is, as a launcher says; else its rank."""
    return int(environment.get("LOCAL_RANK", rank))
