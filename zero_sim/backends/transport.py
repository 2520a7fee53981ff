"""Protocol of transports, which carry the collectives of real processes.

All differences between gloo and NCCL are behind this protocol, so the code around it runs with
either. Calls of CUDA and NCCL themselves are one object further, in `zero_sim.backends.cuda`.
`zero_sim.backends.transports` has all transports.
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
    """One process's membership in a group to be created."""

    store: dist.Store
    rank: int
    """Rank in the group."""
    ranks: tuple[int, ...]
    """World ranks of all members."""
    name: str
    timeout: timedelta


class Transport(Protocol):
    """Carrier of one process's collectives."""

    name: str
    """`gloo` or `nccl`."""
    own_order: str
    """Order in which the transport adds by itself, as it is set up here."""
    device_type: str
    """Device type of its ranks, `cpu` or `cuda`."""
    torch_name: str
    """Name of its backend in torch."""
    device: torch.device | None
    """Device of this process, once it is taken; None on the CPU."""
    bound_device: torch.device | None
    """The device, if torch should bind groups to it, and so connect them at their creation."""
    lacks: tuple[str, ...]
    """Names of reduce operations that it does not have."""
    renews: bool
    """True if a process may be unusable after a failed case."""

    @property
    def processes_max(self) -> int | None:
        """Largest number of processes on this machine; None for any number."""
        ...

    def check(self) -> None:
        """Check that this machine has the transport.

        Raises:
            EnvironmentProblem: It does not; the message names the missing part.
        """
        ...

    def prepare(self, environment: MutableMapping[str, str]) -> None:
        """Set the environment variables that a process needs before it uses the transport.

        Raises:
            EnvironmentProblem: A variable contradicts them.
        """
        ...

    def take_device(self, local_rank: int) -> None:
        """Take the device for the process with this number on its machine.

        Raises:
            EnvironmentProblem: There is none.
        """
        ...

    def make_group(self, membership: Membership) -> Any:
        """Return a process group of this transport that is not registered with torch."""
        ...

    def warm_up(self) -> None:
        """Make the first call of the default group, which includes all slow set-up."""
        ...

    def abort(self) -> None:
        """Leave every group of this process at once, with operations pending."""
        ...

    def identity(self) -> Mapping[str, str]:
        """Return facts that must be equal, or different, on the processes of one job."""
        ...

    def notes(self, process_count: int) -> Sequence[str]:
        """Describe the fixed settings, once the device is taken."""
        ...
