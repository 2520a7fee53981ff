"""A stand-in for NCCL: gloo moves data, and every rank adds in NCCL's ring order by itself.

It replaces `zero_sim.backends.cuda`, so that all of `zero_sim.backends.nccl` and the code around it
runs, in this process and in workers that import it. It has NCCL's order of addition, with a ring of
any permutation, and groups bound to a device. Unlike NCCL, it has no streams, and hangs only where
gloo hangs. Its devices are the CPU in name only, or the stand-in device in processes in which
`tests.standin` installs it.

Environment variables describe the machine:

- `ZERO_SIM_TEST_GPUS`: number of devices, if they are the CPU.
- `ZERO_SIM_TEST_GPU_NAMES`: model of each rank's device, comma-separated.
- `ZERO_SIM_TEST_RING`: ring of the world, comma-separated ranks. Smaller groups use a part.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from tests.standin.staged import Staged
from zero_sim.backends import folding
from zero_sim.backends.nccl import Nccl
from zero_sim.backends.transport import Membership
from zero_sim.backends.transports import put_transport
from zero_sim.sim.order import Fold, Stretch
from zero_sim.sim.order_backends import NcclRing

NAME = "standin_nccl"


class StandIn:
    """Replacement for the calls of CUDA and NCCL.

    Args:
        device_type: `cpu` for devices in name only, or the stand-in device's name.
    """

    torch_name = NAME

    def __init__(self, device_type: str = "cpu") -> None:
        self.device_type = device_type
        self.binds = device_type != "cpu"
        self.used: list[int] = []

    def is_built(self) -> bool:
        return True

    def device_count(self) -> int:
        if self.binds:
            return torch.accelerator.device_count()
        return int(os.environ.get("ZERO_SIM_TEST_GPUS", "8"))

    def version(self) -> tuple[int, ...]:
        return (2, 30, 7)

    def toolkit(self) -> str:
        return "none"

    def device_name(self, index: int) -> str:
        names = os.environ.get("ZERO_SIM_TEST_GPU_NAMES", "stand-in").split(",")
        return names[index % len(names)]

    def device_id(self, index: int) -> str:
        return f"uuid-{index}"

    def use(self, index: int) -> None:
        self.used.append(index)
        if self.binds:
            torch.accelerator.set_device_index(index)

    def make_group(self, membership: Membership, *, device: torch.device) -> Any:
        assert device.index is not None
        size = len(membership.ranks)
        group = dist.ProcessGroupGloo(membership.store, membership.rank, size, membership.timeout)
        group.options.global_ranks_in_group = list(membership.ranks)
        return Staged(group) if self.binds else group

    def abort_all(self) -> None:
        c10d._abort_process_group()

    def synchronize(self) -> None:
        if self.binds:
            torch.accelerator.synchronize()


def install(device_type: str = "cpu") -> None:
    """Register the stand-in as this process's `nccl`."""
    put_transport("nccl", lambda: Nccl(StandIn(device_type)))
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=[device_type])


def _create(options: Any, more: Any) -> Any:
    return folding.make_group(options, transport="nccl", order=Turned(ring_of(options)))


def ring_of(options: Any) -> list[int]:
    """Return the ring of a group, as group ranks."""
    members = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    told = os.environ.get("ZERO_SIM_TEST_RING", "")
    ring = [int(rank) for rank in told.split(",") if told and int(rank) in members]
    if len(ring) != len(members):
        ring = sorted(members)
    return [members.index(rank) for rank in ring]


class Turned(NcclRing):
    """NCCL's ring, with the ranks in another order."""

    def __init__(self, ring: Sequence[int]) -> None:
        self._ring = ring

    def reduce(self, parts: Sequence[Tensor], fold: Fold, *, at: Stretch) -> Tensor:
        ring = self._ring
        if at.destination is not None:
            at = replace(at, destination=ring.index(at.destination))
        return super().reduce([parts[rank] for rank in ring], fold, at=at)
