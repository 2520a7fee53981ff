"""A wrapper around each module with params: they are sharded, and whole only while it runs.

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
    """A wrapper that shards the params of a module itself, without those of its children.

    Args:
        module: The module, which loses its params. While it runs, it has views of the whole buffer.
        group: The data-parallel group. Ranks keep equal shards; the last are padded with zeros.
        prefix: Prefix of these params' names in the whole model, such as "layers.0.".
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
        """Return the module's params by name, as views of its whole buffer."""
        bounds = pairwise(accumulate(map(prod, self.shapes.values()), initial=0))
        return {
            name: flat[start:stop].view(shape)
            for (name, shape), (start, stop) in zip(self.shapes.items(), bounds, strict=True)
        }


def wrap(module: nn.Module, group: ProcessGroup, *, prefix: str = "") -> nn.Module:
    """Wrap a module and its children if they have params; return the wrapper to call."""
    for name, child in list(module.named_children()):
        setattr(module, name, wrap(child, group, prefix=f"{prefix}{name}."))
    if any(True for _ in module.parameters(recurse=False)):
        return Sharded(module, group, prefix=prefix)
    return module
