"""Naive ZeRO: the whole idea on a single screen, slow and plain, equal bit for bit to the engine.

All params form a long vector, and every rank owns an equal slice of it. Only the owner keeps the
slice's fp32 values and optimizer state. A step has four lines:

    1. put this rank's gradients into a vector
    2. reduce-scatter it: each rank gets the sum of its own slice over all ranks
    3. step the owned slice
    4. all-gather the slices, so that every rank has all params again

This is stage 1. The engine works in buckets, so that a bucket can move while the next is computed.
Stage 2 reduces a bucket as soon as backward has filled it and keeps only the owned slice, so the
vector in line 1 is never complete. Stage 3 also keeps only a slice of the params: line 4 comes
before each forward and backward that needs a bucket, and is undone afterwards. Stage 0 is plain
data parallelism: line 2 is an all-reduce, every rank owns everything, and line 4 is dropped. With
redundancy, slices are per shard group, and a sum over the replicas follows line 2.

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
    """Stage 1 for a module whose params have equal dtypes.

    Args:
        module: The module to train; equal on every rank.
        group: The ranks that train together.
        optim_factory: Builds a rank's optimizer from its slice.
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
        # 1D fp32, [elements / world size]; a copy, not a view of the params.
        self.master = nn.Parameter(self._own_slice(whole).to(torch.float32), requires_grad=False)
        self.inner = optim_factory([self.master])

    @torch.no_grad()
    def step(self) -> None:
        """Update all params on every rank from all ranks' gradients, then drop the gradients."""
        # A param without a gradient on this rank takes part too, because others wait for the sum.
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._params]
        # whole: 1D, padded to a multiple of the world size; reduced: 1D, one slice.
        whole = self._as_vector(grads)
        reduced = torch.empty_like(self._own_slice(whole))
        reduce_scatter_sum(reduced, whole, group=self._group)
        # A tensor, because CUDA divides by a Python number by multiplying with a reciprocal.
        self.master.grad = reduced.to(torch.float32) / reduced.new_full(
            (), self._world_size, dtype=torch.float32
        )
        # The optimizer is elementwise, so a slice is stepped as it would be in the whole vector.
        self.inner.step()
        # Reuse `whole`: it has the right length and dtype, and its gradients are no longer needed.
        all_gather(whole, self.master.to(whole.dtype), group=self._group)
        self._take(whole)
        for param in self._params:
            param.grad = None

    def _as_vector(self, tensors: list[Tensor]) -> Tensor:
        """Concatenate all elements, with zeros up to a multiple of the world size."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        return nn.functional.pad(flat, (0, -flat.numel() % self._world_size))

    def _own_slice(self, whole: Tensor) -> Tensor:
        # [elements / world size]: `whole` is padded, so all chunks are equally long.
        return whole.chunk(self._world_size)[self._rank]

    def _take(self, whole: Tensor) -> None:
        # Padding at the end belongs to no param and is dropped.
        start = 0
        for param in self._params:
            param.copy_(whole[start : start + param.numel()].view(param.shape))
            start += param.numel()
