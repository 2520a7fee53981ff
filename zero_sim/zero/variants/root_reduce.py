"""Sums of whole gradients: by an all-reduce, or on the first rank of a group.

A unit's `sum_all` sends every rank the sum of all, of which it keeps its shard. That moves as much
again as a reduce-scatter. On the first rank, the naive way, it moves far more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor

from zero_sim.zero.collectives import SumAll, all_reduce_sum, size_and_rank
from zero_sim.zero.schedule import UnderBackward

SumBy = Literal["reduce-scatter", "all-reduce", "first-rank"]


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


SUMS_OF_ALL: Final[Mapping[SumBy, SumAll | None]] = {
    "reduce-scatter": None,
    "all-reduce": all_reduce_sum,
    "first-rank": sum_at_first,
}
"""How whole gradients are summed; None where shards are."""


class UnderBackwardAtFirst(UnderBackward):
    """Reduces each unit as soon as it is ready, by sums that end with another call.

    That call has to come before a gather in its group, or it pairs with it on a faster rank.
    """

    def before_gather(self, group: dist.ProcessGroup | None) -> None:
        """Wait for the sum that was issued last, if it was in that group."""
        if self._issued_count:
            last = self._units[self._issued_count - 1]
            if last.sum_all is sum_at_first and last.group is group:
                last.finish_reduce()
