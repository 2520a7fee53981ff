"""Transports: what carries the collectives of real processes, and on what their ranks compute.

All that differs between gloo and NCCL stands behind one protocol, so that every line around it runs
with either; what calls CUDA or NCCL itself is one object behind that, `zero_sim.backends.cuda`.
`zero_sim.backends.transports` knows all there are.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist


@dataclass(frozen=True, kw_only=True, slots=True)
class Membership:
    """One process's place in a group that is to be made."""

    store: dist.Store
    rank: int
    """Its rank in the group."""
    ranks: tuple[int, ...]
    """World ranks of all members."""
    name: str
    timeout: timedelta


class Transport(Protocol):
    """What carries the collectives of one process."""

    name: str
    """`gloo` or `nccl`."""
    own_order: str
    """The order that it is said to add in by itself, as it is set up here."""
    device_type: str
    """Where its ranks compute, `cpu` or `cuda`."""
    torch_name: str
    """What torch calls it."""
    device: torch.device | None
    """The device of this process, once it is taken; None where it needs none."""
    bound_device: torch.device | None
    """The same, where torch is to bind groups to it: it connects them when they are made."""
    lacks: tuple[str, ...]
    """Names of reduce operations that it has not."""
    renews: bool
    """Whether a process in which a case failed may be of no use for the next one."""

    @property
    def processes_max(self) -> int | None:
        """Most processes on this machine; None for any number."""
        ...

    def check(self) -> None:
        """Check that this machine has it.

        Raises:
            EnvironmentProblem: It has not; says what is missing.
        """
        ...

    def prepare(self, environment: MutableMapping[str, str]) -> None:
        """Set what has to be set before a process starts to use it.

        Raises:
            EnvironmentProblem: What is set already contradicts it.
        """
        ...

    def take_device(self, local_rank: int) -> None:
        """Take the device of a process, the so many-th of its machine.

        Raises:
            EnvironmentProblem: There is none.
        """
        ...

    def make_group(self, membership: Membership) -> Any:
        """A process group of this transport alone, which torch does not know of."""
        ...

    def warm_up(self) -> None:
        """Make the first call of the default group, which sets up all that takes time."""
        ...

    def abort(self) -> None:
        """Leave every group of this process at once, whatever is under way in them."""
        ...

    def identity(self) -> Mapping[str, str]:
        """What must be the same, or different, on the processes of one job."""
        ...

    def notes(self, process_count: int) -> Sequence[str]:
        """What is fixed about it, in words, with the device taken."""
        ...
