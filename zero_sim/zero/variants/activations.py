"""Activation checkpoints, whole or split over tensor-parallel ranks: P_a of ZeRO-R.

With recomputation a block keeps only its input, the checkpoint, and backward runs the block again.
All tensor-parallel ranks have the same checkpoint. With `split`, each rank keeps only a part, and
an all-gather precedes the second run (ZeRO, arXiv 1910.02054, section 6.1). A block issues six sums
that are as long as this gather. With offloading the checkpoint is on the CPU and takes no device
memory.
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
    """A checkpoint, until its block runs again."""

    memory: Tensor | None  # 1D, the whole checkpoint or this rank's part
    shape: torch.Size
    device: torch.device


class TensorParallel:
    """A rank's collectives and checkpoints around tensor-parallel layers.

    Args:
        group: The tensor-parallel ranks, in order of their parts; None if this rank holds all.
        checkpoints: Memory kept for a block's backward: `none` for autograd's own, `whole` for the
            checkpoint, `split` for this rank's part of it.
        offload: True to keep checkpoints on the CPU.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, *, checkpoints: Checkpoints, offload: bool = False
    ) -> None:
        self._group = group
        self._checkpoints: Checkpoints = checkpoints
        self._offload = offload
        self._kept: list[_Kept] = []

    def enter(self, x: Tensor) -> Tensor:
        """Return `x`. Backward sums its gradient over the ranks."""
        return x if self._group is None else _applied(_Enter, x, self._group)

    def leave(self, y: Tensor) -> Tensor:
        """Return the sum over the ranks. Its gradient passes unchanged to each rank."""
        return y if self._group is None else _applied(_Leave, y, self._group)

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        """Run a block now and, if its checkpoint is kept, again in backward."""
        # Without gradients there is no backward, so nothing to keep.
        if self._checkpoints == "none" or not torch.is_grad_enabled():
            return block(x)
        return _applied(_Checkpointed, x, block, self)

    def memory(self) -> Iterator[Tensor]:
        """Return all checkpoints in memory, 1D."""
        return (kept.memory for kept in self._kept if kept.memory is not None)

    def keep(self, x: Tensor) -> _Kept:
        """Keep a copy of an activation, or this rank's part of it."""
        flat = x.detach().reshape(-1)  # 1D
        memory = flat
        if self._checkpoints == "split" and self._group is not None:
            ranks, rank = size_and_rank(self._group)
            # Rounded up, with zeros after the last elements, because all_gather needs equal parts.
            each = -(-flat.numel() // ranks)
            # 1D, this rank's part.
            memory = flat.new_zeros(each)
            own = flat[rank * each : (rank + 1) * each]
            memory[: own.numel()].copy_(own)
        # A blocking copy, so that it ends before the device memory is reused.
        if self._offload:
            memory = torch.empty_like(memory, device="cpu").copy_(memory)
        kept = _Kept(memory, x.shape, x.device)
        self._kept.append(kept)
        return kept

    def bring_back(self, kept: _Kept) -> Tensor:
        """Return the activation in its own memory, and drop the checkpoint."""
        assert kept.memory is not None
        part = kept.memory.to(kept.device)
        # Drop it here, because memory() counts only blocks that have yet to run again.
        kept.memory = None
        self._kept.remove(kept)
        if self._checkpoints == "split" and self._group is not None:
            ranks, _ = size_and_rank(self._group)
            # 1D, ranks * each elements; the padding is cut off.
            whole = part.new_empty(ranks * part.numel())
            all_gather(whole, part, group=self._group)
            part = whole[: kept.shape.numel()]
        return part.view(kept.shape)


class _Enter(torch.autograd.Function):
    """Forward: identity. Backward: sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # A clone, because the sum works in place and autograd may use this gradient elsewhere.
        summed = grads[0].contiguous().clone()
        all_reduce_sum(summed, group=ctx.group)
        return summed, None


class _Leave(torch.autograd.Function):
    """Forward: sum over ranks. Backward: identity."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, group: dist.ProcessGroup) -> Tensor:
        # A clone, because the sum works in place and `y` belongs to another autograd function.
        summed = y.contiguous().clone()
        all_reduce_sum(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # The sum's derivative by each rank's term is 1.
        return grads[0], None


class _Checkpointed(torch.autograd.Function):
    """Forward: a block, keeping only its input. Backward: the block again, then its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: nn.Module, parallel: TensorParallel) -> Tensor:
        ctx.block, ctx.parallel = block, parallel
        ctx.kept = parallel.keep(x)
        # Autograd records nothing inside a Function's forward, so the block keeps no activations.
        return block(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        # A new leaf, so that this backward ends at the block's input.
        x = ctx.parallel.bring_back(ctx.kept).requires_grad_()
        with torch.enable_grad():
            out = ctx.block(x)
        # Unlike autograd.grad, this accumulates into the params and fires their hooks.
        torch.autograd.backward(out, grads[0])
        return x.grad, None, None


def _applied(function: type[torch.autograd.Function], *args: object) -> Tensor:
    out = function.apply(*args)
    assert isinstance(out, Tensor)
    return out
