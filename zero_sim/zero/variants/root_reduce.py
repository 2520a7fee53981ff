"""Sums of whole gradients: by an all-reduce, or on the first rank of a group.

Every rank gets the sum of a whole unit, of which it keeps its shard. That moves as much again as a
reduce-scatter. On the first rank, the naive way, it moves far more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from zero_sim.errors import UsageError
from zero_sim.zero.collectives import all_reduce_sum, size_and_rank
from zero_sim.zero.schedule import UnderBackward
from zero_sim.zero.unit import Unit


def sum_at_first(
    flat: Tensor, *, group: dist.ProcessGroup, async_op: bool = False
) -> dist.Work | None:
    """As `all_reduce_sum`, the naive way: all send to the first rank, which adds and sends back.

    That rank adds in rank order, in the dtype of `flat`, and moves 2(N - 1) times as much as `flat`
    holds, where each rank of a ring moves less than twice that.
    """
    size, rank = size_and_rank(group)
    parts = [torch.empty_like(flat) for _ in range(size)] if rank == 0 else None
    sent = dist.gather(flat, parts, group_dst=0, group=group, async_op=True)
    summing = _SumAtFirst(flat=flat, parts=parts, sent=sent, group=group)
    if async_op:
        return cast("dist.Work", summing)
    summing.wait()
    return None


@dataclass(kw_only=True, slots=True)
class _SumAtFirst:
    """A sum at the first rank, in flight: the second half of it is made by whoever waits."""

    flat: Tensor
    parts: list[Tensor] | None
    """What each rank sent, on the first rank."""
    sent: dist.Work | None
    group: dist.ProcessGroup

    def wait(self) -> None:
        """Add what was sent, and send the sum back."""
        assert self.sent is not None
        self.sent.wait()
        if self.parts is not None:
            self._add(self.parts)
            self.parts = None
        self._send_back()

    def _add(self, parts: list[Tensor]) -> None:
        self.flat.copy_(parts[0])
        for part in parts[1:]:
            self.flat.add_(part)

    def _send_back(self) -> None:
        dist.broadcast(self.flat, group_src=0, group=self.group)


@dataclass(kw_only=True, slots=True, eq=False)
class WholeSumUnit(Unit):
    """A unit whose whole gradients are summed to all ranks that shard it."""

    sum_all: ClassVar[Callable[..., dist.Work | None]]
    """Sums a tensor to all ranks of a group; arguments as `all_reduce_sum`."""

    def _sum_shards(self, *, async_op: bool) -> dist.Work | None:
        if self.group is None:
            return None
        return self.sum_all(self.grads, group=self.group, async_op=async_op)


@dataclass(kw_only=True, slots=True, eq=False)
class AllReducedUnit(WholeSumUnit):
    """A unit whose whole gradients are summed by an all-reduce.

    Raises:
        UsageError: If nothing is sharded.
    """

    sum_all = staticmethod(all_reduce_sum)

    def __post_init__(self) -> None:
        # Stage 0 sums by an all-reduce as it is. Accepted there, the unit would change nothing.
        if self.group is None:
            raise UsageError(
                f"expected stage 1, 2 or 3 with AllReducedUnit, of whose sum each rank keeps its "
                f"shard, got {self.name} of stage 0, which sums to all ranks by itself. Remove "
                f"`unit`, or pass SummedAtFirstUnit."
            )


@dataclass(kw_only=True, slots=True, eq=False)
class SummedAtFirstUnit(WholeSumUnit):
    """A unit whose whole gradients are summed on the first rank, at stage 0 too."""

    sum_all = staticmethod(sum_at_first)

    def _sum_replicas(self, *, async_op: bool) -> dist.Work | None:
        if self.group is not None or self.replica_group is None:
            return Unit._sum_replicas(self, async_op=async_op)
        return sum_at_first(self.grad_shard, group=self.replica_group, async_op=async_op)


class UnderBackwardAtFirst(UnderBackward):
    """Reduces each unit as soon as it is ready, by sums that end with another call.

    That call has to come before a gather in its group, or it pairs with it on a faster rank.
    """

    def before_gather(self, group: dist.ProcessGroup | None) -> None:
        """Wait for the sum that was issued last, if it was in that group."""
        if self._issued_count:
            last = self._units[self._issued_count - 1]
            if isinstance(last, SummedAtFirstUnit) and last.group is group:
                last.finish_reduce()
