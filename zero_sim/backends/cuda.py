"""All calls of CUDA and NCCL in torch that real processes need.

Only this module needs a GPU to run. All decisions are in `zero_sim.backends.nccl`.
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
    """Device type in torch."""
    torch_name: str = "nccl"
    """Backend name in torch."""
    binds: bool = True
    """True if torch binds groups to devices, as it does except on the CPU."""

    def is_built(self) -> bool:
        """Return True if this torch was built with NCCL."""
        return dist.is_nccl_available()

    def device_count(self) -> int:
        """Return the number of GPUs for this process."""
        return torch.cuda.device_count()

    def version(self) -> tuple[int, ...]:
        """Return NCCL's version."""
        return tuple(part for part in torch.cuda.nccl.version() if isinstance(part, int))

    def toolkit(self) -> str:
        """Return torch's CUDA version."""
        return str(torch.version.cuda)

    def device_name(self, index: int) -> str:
        """Return a GPU's model."""
        return torch.cuda.get_device_name(index)

    def device_id(self, index: int) -> str:
        """Return a GPU's unique id."""
        return str(torch.cuda.get_device_properties(index).uuid)

    def use(self, index: int) -> None:
        """Compute on a GPU from now on."""
        torch.cuda.set_device(index)

    def make_group(self, membership: Membership, *, device: torch.device) -> Any:
        """Return a connected `ProcessGroupNCCL`."""
        # Set options like torch's own `_new_process_group_helper`.
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = membership.timeout
        options.global_ranks_in_group = list(membership.ranks)
        options.group_name = c10d.GroupName(membership.name)
        size = len(membership.ranks)
        group = dist.ProcessGroupNCCL(membership.store, membership.rank, size, options)
        group._set_sequence_number_for_group()
        # Connect now, as torch does if a group is bound to a device.
        group.eager_connect_single_device(device)
        return group

    def abort_all(self) -> None:
        """Abort the communicators of all groups, and forget the groups."""
        c10d._abort_process_group()

    def synchronize(self) -> None:
        """Wait for all work on this process's GPU."""
        torch.cuda.synchronize()
