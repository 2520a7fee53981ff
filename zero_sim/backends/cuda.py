"""CUDA and NCCL as torch has them: every call of either that real processes need, and no more.

Only this module cannot run without a GPU; `zero_sim.backends.nccl` decides, this obeys.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from zero_sim.backends.transport import Membership


class Cuda:
    """This process's CUDA, and the NCCL that torch was built with or finds."""

    device_type: str = "cuda"
    """What torch calls its devices."""
    torch_name: str = "nccl"
    """What torch calls its process groups."""
    binds: bool = True
    """Whether torch binds groups to its devices, as to all but the CPU."""

    def is_built(self) -> bool:
        """Whether this torch has NCCL at all."""
        return dist.is_nccl_available()

    def device_count(self) -> int:
        """GPUs that this process may use."""
        return torch.cuda.device_count()

    def version(self) -> tuple[int, ...]:
        """Of NCCL."""
        return tuple(part for part in torch.cuda.nccl.version() if isinstance(part, int))

    def toolkit(self) -> str:
        """Of CUDA, as torch was built with."""
        return str(torch.version.cuda)

    def device_name(self, index: int) -> str:
        """The kind of a GPU."""
        return torch.cuda.get_device_name(index)

    def device_id(self, index: int) -> str:
        """What tells a GPU from all others."""
        return str(torch.cuda.get_device_properties(index).uuid)

    def use(self, index: int) -> None:
        """Compute on a GPU from now on."""
        torch.cuda.set_device(index)

    def make_group(self, membership: Membership, *, device: torch.device) -> Any:
        """A connected `ProcessGroupNCCL`."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = membership.timeout
        options.global_ranks_in_group = list(membership.ranks)
        options.group_name = c10d.GroupName(membership.name)
        size = len(membership.ranks)
        group = dist.ProcessGroupNCCL(membership.store, membership.rank, size, options)
        group._set_sequence_number_for_group()
        group.eager_connect_single_device(device)
        return group

    def abort_all(self) -> None:
        """Abort the communicators of all groups, and forget the groups."""
        c10d._abort_process_group()

    def synchronize(self) -> None:
        """Wait for all work on the GPU of this process."""
        torch.cuda.synchronize()
