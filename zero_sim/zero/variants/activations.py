"""Activation checkpoints, whole or split over tensor-parallel ranks: P_a of ZeRO-R.

With recomputation a block keeps what it began with, its checkpoint, and nothing else; backward runs
it once more. Tensor-parallel ranks have the same checkpoint each. Split, each keeps its part, and
they are all-gathered before the block is run again (ZeRO, arXiv 1910.02054, section 6.1): one
gather beside six sums of the same length. On the CPU, where it is offloaded to, it takes nothing of
the device's memory at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_sim.zero.collectives import all_gather, all_reduce_sum, size_and_rank

Checkpoints = Literal["none", "whole", "split"]


@dataclass(slots=True, eq=False)
class _Kept:
    """One checkpoint, as long as its block was not run again."""

    memory: Tensor | None  # 1D, all of it or this rank's part
    shape: torch.Size
    device: torch.device


class TensorParallel:
    """What one of several tensor-parallel ranks does around the layers that they split.

    Args:
        group: The ranks that hold a part each, by part; None for one that holds all.
        checkpoints: What is kept of a block until its backward: all that autograd wants, its
            checkpoint, or this rank's part of that.
        offload: Whether checkpoints are kept on the CPU.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, *, checkpoints: Checkpoints, offload: bool = False
    ) -> None:
        self._group = group
        self._checkpoints: Checkpoints = checkpoints
        self._offload = offload
        self._kept: list[_Kept] = []

    def enter(self, x: Tensor) -> Tensor:
        """Return it; backward sums its gradient over the ranks."""
        return x if self._group is None else _applied(_Enter, x, self._group)

    def leave(self, y: Tensor) -> Tensor:
        """Return the sum over the ranks, in place; its gradient is that of each."""
        return y if self._group is None else _applied(_Leave, y, self._group)

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        """Run a block, now and, where its checkpoint is kept, in backward."""
        if self._checkpoints == "none" or not torch.is_grad_enabled():
            return block(x)
        return _applied(_Checkpointed, x, block, self)

    def memory(self) -> Iterator[Tensor]:
        """All checkpoints that are there."""
        return (kept.memory for kept in self._kept if kept.memory is not None)

    def keep(self, x: Tensor) -> _Kept:
        """Keep what is to be kept of an activation."""
        flat = x.detach().reshape(-1)
        memory = flat
        if self._checkpoints == "split" and self._group is not None:
            ranks, rank = size_and_rank(self._group)
            each = -(-flat.numel() // ranks)
            memory = flat.new_zeros(each)
            own = flat[rank * each : (rank + 1) * each]
            memory[: own.numel()].copy_(own)
        if self._offload:
            memory = torch.empty_like(memory, device="cpu").copy_(memory)
        kept = _Kept(memory, x.shape, x.device)
        self._kept.append(kept)
        return kept

    def bring_back(self, kept: _Kept) -> Tensor:
        """Return the activation, in memory of its own, and let go of what was kept."""
        assert kept.memory is not None
        part = kept.memory.to(kept.device)
        kept.memory = None
        self._kept.remove(kept)
        if self._checkpoints == "split" and self._group is not None:
            ranks, _ = size_and_rank(self._group)
            whole = part.new_empty(ranks * part.numel())
            all_gather(whole, part, group=self._group)
            part = whole[: kept.shape.numel()]
        return part.view(kept.shape)


class _Enter(torch.autograd.Function):
    """Forward: nothing. Backward: a sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        summed = grads[0].contiguous().clone()
        all_reduce_sum(summed, group=ctx.group)
        return summed, None


class _Leave(torch.autograd.Function):
    """Forward: a sum over ranks. Backward: nothing."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, group: dist.ProcessGroup) -> Tensor:
        summed = y.contiguous().clone()
        all_reduce_sum(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Checkpointed(torch.autograd.Function):
    """Forward: a block, of which its input is kept. Backward: the block again, and its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: nn.Module, parallel: TensorParallel) -> Tensor:
        ctx.block, ctx.parallel = block, parallel
        ctx.kept = parallel.keep(x)
        return block(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        x = ctx.parallel.bring_back(ctx.kept).requires_grad_()
        with torch.enable_grad():
            out = ctx.block(x)
        torch.autograd.backward(out, grads[0])
        return x.grad, None, None


def _applied(function: type[torch.autograd.Function], *args: object) -> Tensor:
    out = function.apply(*args)
    assert isinstance(out, Tensor)
    return out
