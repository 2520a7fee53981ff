"""Data parallelism by hooks: every gradient is averaged over the ranks where autograd computes it.

A hook on a tensor returns a new gradient. It must not write to its argument, because autograd may
pass the same tensor to other nodes of the graph.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup


class HookedDataParallel(nn.Module):
    """A module whose gradients are averaged over the ranks before they are accumulated.

    Every backward averages, so `.grad` is the sum of the averages of several micro-batches.

    Args:
        module: The same params on every rank after this call: those of the first rank.
        group: The data-parallel group.
    """

    def __init__(self, module: nn.Module, group: ProcessGroup) -> None:
        super().__init__()
        self.module, self.group = module, group
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), group_src=0, group=group)
        self.handles = [
            param.register_hook(self.average)
            for param in module.parameters()
            if param.requires_grad
        ]

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.module(*args, **kwargs)

    def average(self, grad: Tensor) -> Tensor:
        """Return the mean of a gradient over the ranks, and leave the gradient as it is."""
        total = grad.clone()
        dist.all_reduce(total, group=self.group)
        return total / self.group.size()

    def remove_hooks(self) -> None:
        for handle in self.handles:
            handle.remove()
