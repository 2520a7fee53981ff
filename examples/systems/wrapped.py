"""A wrapper around each module that has params: they are sharded, and whole only while it is used.

Sharding is a node of the autograd graph: forward gathers a module's flat buffer, and backward
reduce-scatters its gradient, so `shard.grad` is the mean over the ranks. Any optimizer may step
the shards.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup


class Gather(torch.autograd.Function):
    """All-gather in forward, mean and reduce-scatter in backward."""

    @staticmethod
    def forward(ctx, shard: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        flat = shard.new_empty(shard.numel() * group.size())
        dist.all_gather_single(flat, shard, group=group)
        return flat

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        shard = grad.new_empty(grad.numel() // ctx.group.size())
        dist.reduce_scatter_single(shard, grad / ctx.group.size(), group=ctx.group)
        return shard, None


class Sharded(nn.Module):
    """Shards the params that a module has itself, without those of its children.

    Args:
        module: Loses its params; while it runs, views of the gathered buffer stand in their place.
        group: Every rank of it keeps an equal shard. The last ones are padded with zeros.
        prefix: Of the names of these params in the whole model, such as "layers.0.".
    """

    def __init__(self, module: nn.Module, group: ProcessGroup, *, prefix: str) -> None:
        super().__init__()
        self.module, self.group, self.prefix = module, group, prefix
        params = dict(module.named_parameters(recurse=False))
        self.shapes = {name: param.shape for name, param in params.items()}
        flat = torch.cat([param.detach().reshape(-1) for param in params.values()])
        flat = nn.functional.pad(flat, (0, -flat.numel() % group.size()))
        self.shard = nn.Parameter(flat.chunk(group.size())[group.rank()].clone())
        for name in params:
            delattr(module, name)

    def forward(self, *args: object, **kwargs: object) -> object:
        try:
            for name, view in self.views(Gather.apply(self.shard, self.group)).items():
                setattr(self.module, name, view)
            return self.module(*args, **kwargs)
        finally:
            for name in self.shapes:
                delattr(self.module, name)

    def whole(self) -> dict[str, Tensor]:
        """Gather the params, by their names in the whole model."""
        views = self.views(Gather.apply(self.shard.detach(), self.group))
        return {self.prefix + name: view for name, view in views.items()}

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Params of the module by name, as views of its whole buffer."""
        bounds = pairwise(accumulate(map(prod, self.shapes.values()), initial=0))
        return {
            name: flat[start:stop].view(shape)
            for (name, shape), (start, stop) in zip(self.shapes.items(), bounds, strict=True)
        }


def wrap(module: nn.Module, group: ProcessGroup, *, prefix: str = "") -> nn.Module:
    """Wrap a module and all inside it, where they have params. Returns the wrapper to call."""
    for name, child in list(module.named_children()):
        setattr(module, name, wrap(child, group, prefix=f"{prefix}{name}."))
    if any(True for _ in module.parameters(recurse=False)):
        return Sharded(module, group, prefix=prefix)
    return module
