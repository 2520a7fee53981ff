"""Interface of process groups to a world of simulated ranks or of processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.distributed import Work

from zero_sim.sim.call import Call
from zero_sim.sim.comm.rendezvous import Group
from zero_sim.sim.failures import WorldFailure


class Cluster(Protocol):
    """The world's services for process groups."""

    def issue(self, group: Group, group_rank: int, call: Call, *, asynchronous: bool) -> Work:
        """Issue a member's call of a collective."""
        ...

    def send(self, group: Group, group_rank: int, peer: int, *, tag: int, tensor: Tensor) -> Work:
        """Issue a send."""
        ...

    def receive(
        self, group: Group, group_rank: int, peer: int | None, *, tag: int, tensor: Tensor
    ) -> Work:
        """Issue a receive."""
        ...

    def join_works(
        self, rank: int, works: Sequence[Any], *, result: Sequence[Any] | None = None
    ) -> Work:
        """Return a work that is done when all `works` are. Its result is all theirs by default."""
        ...

    def note_destroyed(self, group: Group, group_rank: int) -> None:
        """Note that a member destroyed its side of a group."""
        ...

    def note_aborted(self, group: Group, group_rank: int) -> None:
        """Note that a member aborted its side of a group."""
        ...

    def device_kinds(self) -> Sequence[str]:
        """Return the kinds of device whose memory the world can move."""
        ...

    def used_after_destroy(self, group: Group, group_rank: int, kind: str) -> WorldFailure:
        """Return the error for a use of a group after a member destroyed its side."""
        ...
