"""Alternatives to reduce-scatter: an all-reduce, or a naive sum on a group's first rank.

Every rank receives the sum of a whole unit and keeps its shard. An all-reduce moves twice as much
as a reduce-scatter; the naive sum moves far more through the first rank.
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
    """Sum like `all_reduce_sum`, the naive way: the first rank receives all, adds and broadcasts.

    It adds in rank order, in the dtype of `flat`. The first rank moves 2(N - 1) times the size of
    `flat`; in a ring all-reduce each rank moves less than twice that size.
    """
    size, rank = size_and_rank(group)
    # N tensors as long as `flat`, on the first rank only.
    parts = [torch.empty_like(flat) for _ in range(size)] if rank == 0 else None
    # Always asynchronous, because wait() continues with the second half.
    sent = dist.gather(flat, parts, group_dst=0, group=group, async_op=True)
    summing = _SumAtFirst(flat=flat, parts=parts, sent=sent, group=group)
    if async_op:
        # The cast is safe, because units only call `wait`.
        return cast("dist.Work", summing)
    summing.wait()
    return None


@dataclass(kw_only=True, slots=True)
class _SumAtFirst:
    """A sum on the first rank, in flight. `wait` performs its second half."""

    flat: Tensor
    parts: list[Tensor] | None
    """Values from each rank; on the first rank only."""
    sent: dist.Work | None
    group: dist.ProcessGroup

    def wait(self) -> None:
        """Add the received values, and broadcast the sum."""
        assert self.sent is not None
        # The broadcast must not start before the gather has ended.
        self.sent.wait()
        if self.parts is not None:
            self._add(self.parts)
            self.parts = None
        self._send_back()

    def _add(self, parts: list[Tensor]) -> None:
        # In rank order from rank 0, because the reference adds in this named order.
        self.flat.copy_(parts[0])
        for part in parts[1:]:
            self.flat.add_(part)

    def _send_back(self) -> None:
        dist.broadcast(self.flat, group_src=0, group=self.group)


@dataclass(kw_only=True, slots=True, eq=False)
class UnshardedSumUnit(Unit):
    """A unit whose unsharded gradients are summed to all ranks in its shard group."""

    sum_all: ClassVar[Callable[..., dist.Work | None]]
    """Sums a tensor to all ranks in a group; arguments as `all_reduce_sum`."""

    def _sum_shards(self, *, async_op: bool) -> dist.Work | None:
        if self.group is None:
            return None
        return self.sum_all(self.grads, group=self.group, async_op=async_op)


@dataclass(kw_only=True, slots=True, eq=False)
class AllReducedUnit(UnshardedSumUnit):
    """A unit whose unsharded gradients are summed by an all-reduce.

    Raises:
        UsageError: If nothing is sharded.
    """

    sum_all = staticmethod(all_reduce_sum)

    def __post_init__(self) -> None:
        # Stage 0 all-reduces anyway, so this unit would have no effect there.
        if self.group is None:
            raise UsageError(
                f"expected stage 1, 2 or 3 with AllReducedUnit, because each rank keeps a shard of "
                f"the sum, got {self.name} of stage 0, which all-reduces anyway. Remove "
                f"`unit`, or pass SummedAtFirstUnit."
            )


@dataclass(kw_only=True, slots=True, eq=False)
class SummedAtFirstUnit(UnshardedSumUnit):
    """A unit whose unsharded gradients are summed on the first rank, at stage 0 too."""

    sum_all = staticmethod(sum_at_first)

    def _sum_replicas(self, *, async_op: bool) -> dist.Work | None:
        # With a shard group, the sum over replicas stays a plain all-reduce.
        if self.group is not None or self.replica_group is None:
            return Unit._sum_replicas(self, async_op=async_op)
        return sum_at_first(self.grad_shard, group=self.replica_group, async_op=async_op)


class UnderBackwardAtFirst(UnderBackward):
    """Reduces each unit as soon as it is ready, for sums that end with a second call.

    This second call must come before a gather in its group, or it could pair with the gather on a
    faster rank.
    """

    def before_gather(self, group: dist.ProcessGroup | None) -> None:
        """Wait for the last issued sum, if it is in that group."""
        if self._issued_count:
            last = self._units[self._issued_count - 1]
            if isinstance(last, SummedAtFirstUnit) and last.group is group:
                last.finish_reduce()
