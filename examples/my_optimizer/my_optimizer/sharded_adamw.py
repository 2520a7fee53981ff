"""AdamW with its state for one slice of the model on each rank."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class ShardedAdamW:
    """AdamW over all params, one after another, cut into one slice for each rank.

    Args:
        params: fp32 params, in the same order on every rank.
        group: The data-parallel group.
        settings: Arguments of `torch.optim.AdamW`, such as `lr`.
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
        """Average the gradients, update this rank's slice, and send all slices to all ranks."""
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
    """Return start and stop of each rank's slice; the first ranks take one more each, if needed."""
    least, longer = divmod(elems, ranks)
    starts = [rank * least + min(rank, longer) for rank in range(ranks + 1)]
    return list(pairwise(starts))
