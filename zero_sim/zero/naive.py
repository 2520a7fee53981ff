"""Naive ZeRO: the whole idea on one screen, slow and plain, equal bit for bit to the engine.

All params are one long vector. Every rank owns an equal slice of it: it alone keeps the fp32 values
and the optimizer's state of that slice. A step is four lines:

    1. put this rank's gradients into one vector
    2. reduce-scatter it: each rank gets the sum over all ranks of its own slice
    3. step the slice that it owns
    4. all-gather the slices, so that every rank has all params again

That is stage 1. The engine does the same in buckets, so that each can move while the next one is
computed. Stage 2 reduces a bucket as soon as backward has filled it, and keeps of it only its own
slice: line 1 is never whole. Stage 3 keeps only its slice of the params as well: line 4 comes
before each forward and backward that needs a bucket, and is undone after it. Stage 0 is plain data
parallelism: line 2 is an all-reduce, every rank owns everything, and there is no line 4. And where
the slices are dealt out inside blocks of ranks, line 2 is followed by a sum across the blocks.

Source: ZeRO (arXiv 1910.02054), section 5.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_sim.zero.collectives import all_gather, reduce_scatter_sum, size_and_rank
from zero_sim.zero.optimizer import OptimFactory


class NaiveZero:
    """Stage 1 of a module whose params all have one dtype.

    Args:
        module: What is trained; the same on every rank.
        group: The ranks that train together.
        optim_factory: Builds the optimizer of one rank from the slice that it owns.
    """

    master: nn.Parameter  # 1D fp32, this rank's slice of all params
    inner: Optimizer

    def __init__(
        self, module: nn.Module, *, group: dist.ProcessGroup, optim_factory: OptimFactory
    ) -> None:
        self._params = [param for param in module.parameters() if param.requires_grad]
        self._group = group
        self._world_size, self._rank = size_and_rank(group)
        whole = self._as_vector([param.detach() for param in self._params])
        self.master = nn.Parameter(self._own_slice(whole).to(torch.float32), requires_grad=False)
        self.inner = optim_factory([self.master])

    @torch.no_grad()
    def step(self) -> None:
        """Update all params on every rank from each rank's own gradients, and drop these."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._params]
        whole = self._as_vector(grads)
        reduced = torch.empty_like(self._own_slice(whole))
        reduce_scatter_sum(reduced, whole, group=self._group)
        # A tensor: by a Python number some devices multiply with its rounded reciprocal.
        self.master.grad = reduced.to(torch.float32) / reduced.new_full(
            (), self._world_size, dtype=torch.float32
        )
        self.inner.step()
        all_gather(whole, self.master.to(whole.dtype), group=self._group)
        self._take(whole)
        for param in self._params:
            param.grad = None

    def _as_vector(self, tensors: list[Tensor]) -> Tensor:
        """All elements, one after another, and zeros until the ranks can share them evenly."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        return nn.functional.pad(flat, (0, -flat.numel() % self._world_size))

    def _own_slice(self, whole: Tensor) -> Tensor:
        return whole.chunk(self._world_size)[self._rank]

    def _take(self, whole: Tensor) -> None:
        start = 0
        for param in self._params:
            param.copy_(whole[start : start + param.numel()].view(param.shape))
            start += param.numel()
