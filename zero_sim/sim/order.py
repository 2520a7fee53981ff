"""In which order, and how precisely, a reduction adds the ranks' contributions.

Floating-point addition does not associate, so a reduction has bits only once its order is named.
Every model here is written as explicit chained operations, each rounded to the dtype of the data
unless the model names a wider accumulator; never `.sum(0)`, whose association torch may change.

The reference holds its own, separate implementation of the same definitions.

[Note: ring positions]
A ring adds the element of chunk `c` in the order `x[c+1], x[c+2], ..., x[c]` (indices modulo the
group size): the rank on which the chunk ends adds its own contribution last. In a reduce-scatter
the chunk ends on its destination. An all-reduce cuts the buffer into `world_size` chunks of
`ceil(numel / world_size)`, and rank `r` sends chunk `r` first, so chunk `c` ends on rank `c - 1`
(Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

Fold = Callable[[Tensor, Tensor], Tensor]
"""Combines two contributions elementwise; may reuse the first one's memory."""

_SIXTEEN_BIT = (torch.bfloat16, torch.float16)


class Order(Protocol):
    """An order model: how contributions that all hold the same elements become one value each."""

    name: str
    positional: bool
    """Whether an element's order depends on where it stands, and so on its destination."""

    def scatter(self, parts: Sequence[Tensor], fold: Fold, *, destination: int) -> Tensor:
        """Reduce one chunk that ends on group rank `destination`; parts in group-rank order."""
        ...

    def everywhere(self, parts: Sequence[Tensor], fold: Fold) -> Tensor:
        """Reduce whole buffers whose result every rank gets; parts are 1D, in group-rank order."""
        ...


def chain(parts: Sequence[Tensor], fold: Fold) -> Tensor:
    """Fold left to right: `((x0 + x1) + x2) + ...`."""
    total = parts[0].clone(memory_format=torch.contiguous_format)
    for part in parts[1:]:
        total = fold(total, part)
    return total


class Linear:
    """Group-rank order, one rounding to the data's dtype at each addition."""

    name = "linear"
    positional = False

    def scatter(self, parts: Sequence[Tensor], fold: Fold, *, destination: int) -> Tensor:
        """Independent of the destination."""
        return chain(parts, fold)

    def everywhere(self, parts: Sequence[Tensor], fold: Fold) -> Tensor:
        """The same order for every element."""
        return chain(parts, fold)


class LinearFp32:
    """Group-rank order with an fp32 accumulator for 16-bit data, rounded once at the end."""

    name = "linear-fp32"
    positional = False

    def scatter(self, parts: Sequence[Tensor], fold: Fold, *, destination: int) -> Tensor:
        """Independent of the destination."""
        return self.everywhere(parts, fold)

    def everywhere(self, parts: Sequence[Tensor], fold: Fold) -> Tensor:
        """The same order for every element."""
        dtype = parts[0].dtype
        if dtype not in _SIXTEEN_BIT:
            return chain(parts, fold)
        return chain([part.float() for part in parts], fold).to(dtype)


class Tree:
    """Balanced pairwise: neighbours are combined level by level, an odd one moves up alone."""

    name = "tree"
    positional = False

    def scatter(self, parts: Sequence[Tensor], fold: Fold, *, destination: int) -> Tensor:
        """Independent of the destination."""
        return self.everywhere(parts, fold)

    def everywhere(self, parts: Sequence[Tensor], fold: Fold) -> Tensor:
        """The same order for every element."""
        level = [part.clone(memory_format=torch.contiguous_format) for part in parts]
        while len(level) > 1:
            paired = [fold(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
            level = paired + ([level[-1]] if len(level) % 2 else [])
        return level[0]


class Ring:
    """The ring algorithm; see [Note: ring positions]."""

    name = "ring"
    positional = True

    def scatter(self, parts: Sequence[Tensor], fold: Fold, *, destination: int) -> Tensor:
        """Starts at the destination's successor, ends on the destination."""
        return chain([*parts[destination + 1 :], *parts[: destination + 1]], fold)

    def everywhere(self, parts: Sequence[Tensor], fold: Fold) -> Tensor:
        """Each of the `len(parts)` chunks starts on the rank of its own index."""
        world_size, numel = len(parts), parts[0].numel()
        chunk_elems = -(-numel // world_size)
        pieces = [
            self.scatter(
                [part[start : start + chunk_elems] for part in parts],
                fold,
                destination=(chunk - 1) % world_size,
            )
            for chunk, start in enumerate(range(0, numel, chunk_elems or 1))
        ]
        return torch.cat(pieces) if pieces else parts[0].clone()


ORDERS: dict[str, Order] = {order.name: order for order in (Linear(), LinearFp32(), Ring(), Tree())}
