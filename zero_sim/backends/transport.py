"""Protocol of transports, which carry the collectives of real processes.

This protocol hides all differences between gloo and NCCL, so other code runs with either.
`zero_sim.backends.cuda` contains the calls of CUDA and NCCL themselves, and
`zero_sim.backends.transports` finds a transport by name.
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
    """A process's membership in a new group."""

    store: dist.Store
    rank: int
    """Rank in the group."""
    ranks: tuple[int, ...]
    """All members' world ranks."""
    name: str
    timeout: timedelta


class Transport(Protocol):
    """Carrier for a process's collectives."""

    name: str
    """`gloo` or `nccl`."""
    own_order: str
    """Order in which the transport adds by itself, with the settings made here."""
    device_type: str
    """Device type of its ranks: `cpu` or `cuda`."""
    torch_name: str
    """Backend name in torch."""
    device: torch.device | None
    """This process's device, once taken; None on the CPU."""
    bound_device: torch.device | None
    """Device to which torch should bind groups, which connects them at creation; None for none."""
    lacks: tuple[str, ...]
    """Names of reduce operations that it lacks."""
    renews: bool
    """True if a process may be unusable after a failed case."""

    @property
    def processes_max(self) -> int | None:
        """Largest number of processes on this machine; None for any number."""
        ...

    def check(self) -> None:
        """Check that this machine has the transport.

        Raises:
            EnvironmentProblem: It does not. The message names the missing part.
        """
        ...

    def prepare(self, environment: MutableMapping[str, str]) -> None:
        """Set environment variables that a process needs before it uses the transport.

        Raises:
            EnvironmentProblem: A variable contradicts them.
        """
        ...

    def take_device(self, local_rank: int) -> None:
        """Take the device for a local rank.

        Raises:
            EnvironmentProblem: There is none.
        """
        ...

    def make_group(self, membership: Membership) -> Any:
        """Return a process group that is not registered with torch."""
        ...

    def warm_up(self) -> None:
        """Make the default group's first call, which includes all slow set-up."""
        ...

    def abort(self) -> None:
        """Leave all groups at once, even with pending operations."""
        ...

    def identity(self) -> Mapping[str, str]:
        """Return facts that must be equal, or different, on the processes of a job."""
        ...

    def notes(self, process_count: int) -> Sequence[str]:
        """Describe the fixed settings, after the device is taken."""
        ...
