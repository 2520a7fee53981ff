"""AdamW that keeps its state for one slice of the model a rank."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class ShardedAdamW:
    """All params, one after another, are cut into as many slices as there are ranks.

    Args:
        params: fp32 params, in the same order on every rank.
        group: The data-parallel group.
        settings: What `torch.optim.AdamW` takes.
    """

    def __init__(
        self, params: Iterable[torch.nn.Parameter], *, group: ProcessGroup, **settings: float
    ) -> None:
        self.params = list(params)
        self.group = group
        self.slices = slices(sum(p.numel() for p in self.params), group.size())
        start, stop = self.slices[group.rank()]
        flat = torch.cat([p.detach().reshape(-1) for p in self.params])
        self.shard = torch.nn.Parameter(flat[start:stop].clone())
        self.optimizer = torch.optim.AdamW([self.shard], foreach=False, **settings)

    def step(self) -> None:
        """Average the gradients, update this rank's slice, and hand all slices to everyone."""
        grad = torch.cat([p.grad.reshape(-1) for p in self.params])
        dist.all_reduce(grad, group=self.group)
        grad /= self.group.size()
        start, stop = self.slices[self.group.rank()]
        self.shard.grad = grad[start:stop]
        self.optimizer.step()
        flat = torch.empty_like(grad)
        pieces = [flat[start:stop] for start, stop in self.slices]
        pieces[self.group.rank()].copy_(self.shard.detach())
        for rank, piece in enumerate(pieces):
            dist.broadcast(piece, group_src=rank, group=self.group)
        self._take(flat)

    @torch.no_grad()
    def _take(self, flat: Tensor) -> None:
        pieces = flat.split([p.numel() for p in self.params])
        for param, piece in zip(self.params, pieces, strict=True):
            param.copy_(piece.view_as(param))


def slices(elems: int, ranks: int) -> list[tuple[int, int]]:
    """Start and stop of each rank's slice; the first ones take one of what is left over each."""
    least, longer = divmod(elems, ranks)
    starts = [rank * least + min(rank, longer) for rank in range(ranks + 1)]
    return list(pairwise(starts))
