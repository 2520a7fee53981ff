"""Data parallelism with a ring all-reduce of its own, made of sends and receives to the neighbours.

All gradients lie in one buffer, in as many chunks as there are ranks. A chunk goes round the ring
once to be summed and once more to be copied, so each rank sends 2 (N - 1) / N of the buffer.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup


class Ring:
    """The ranks of a group in a circle: each sends to the next and receives from the one before."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group, self.size, self.rank = group, group.size(), group.rank()
        self.next = dist.get_global_rank(group, (self.rank + 1) % self.size)
        self.previous = dist.get_global_rank(group, (self.rank - 1) % self.size)

    def all_reduce(self, flat: Tensor) -> None:
        """Sum a 1D tensor over the ranks, in place; its length is a multiple of their number."""
        chunks = flat.chunk(self.size)
        received = torch.empty_like(chunks[0])
        for turn in range(self.size - 1):
            self.exchange(chunks[(self.rank - turn) % self.size], received)
            chunks[(self.rank - turn - 1) % self.size].add_(received)
        for turn in range(self.size - 1):
            self.exchange(chunks[(self.rank + 1 - turn) % self.size], received)
            chunks[(self.rank - turn) % self.size].copy_(received)

    def exchange(self, sent: Tensor, received: Tensor) -> None:
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, self.next, group=self.group),
                dist.P2POp(dist.irecv, received, self.previous, group=self.group),
            ]
        )
        for work in works:
            work.wait()


class RingDataParallel:
    """Data parallelism that averages the gradients of params over a ring.

    Args:
        params: The same on every rank, fp32. Their gradients become views of one buffer.
        group: The data-parallel group.
    """

    def __init__(self, params: Iterable[nn.Parameter], group: ProcessGroup) -> None:
        self.params, self.ring = list(params), Ring(group)
        elems = sum(param.numel() for param in self.params)
        self.flat = torch.zeros(elems + -elems % self.ring.size)
        self.zero_grad()

    def zero_grad(self) -> None:
        """Zero the buffer, and let backward accumulate into it."""
        self.flat.zero_()
        first = 0
        for param in self.params:
            param.grad = self.flat[first : first + param.numel()].view_as(param)
            first += param.numel()

    def average(self) -> None:
        if self.ring.size > 1 and self.flat.numel():
            self.ring.all_reduce(self.flat)
            self.flat /= self.ring.size
