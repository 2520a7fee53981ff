"""Order and precision in which a reduction adds the ranks' contributions.

Floating-point addition does not associate, so a reduction's bits are only defined for a named
order. Each order model is an explicit sequence of operations, which round to the data's dtype
unless the model names a wider accumulator. `.sum(0)` is never used, because torch may change its
association.

This module contains the orders for textbooks and tests, `order_backends` the orders of real
backends. The reference implements the same definitions separately.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

Fold = Callable[[Tensor, Tensor], Tensor]
"""Combines two contributions elementwise. May write into the first."""

Averaging = Literal["divide", "premultiply", "postmultiply"]
"""Definition of AVG. `divide`: a true division of the sum, in the data's dtype. `premultiply`:
multiply each contribution by 1 / world size before the sum, both rounded to the data's dtype.
`postmultiply`: multiply the accumulator by the fp32 reciprocal, then round to the data's dtype."""

Piece = tuple[int, int, Sequence[int]]
"""Half-open range of elements, and the ranks in order of addition."""

TREE_CLASSES = 7
_SIXTEEN_BIT = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Consecutive elements that a call reduces, and their position in the call."""

    kind: str
    """`all_reduce`, `reduce`, `reduce_scatter` or `reduce_scatter_list`."""
    buffer_elems: int
    """Size of the tensor that contains the elements."""
    start: int = 0
    """Offset of the first element in that tensor."""
    call_elems: int
    """Size of all the call's tensors; more than `buffer_elems` in a coalesced call."""
    call_start: int = 0
    """Offset of the first element in the concatenation of all the call's tensors."""
    destination: int | None = None
    """Group rank that gets the result; None if all ranks get it."""


class Order(Protocol):
    """An order model, which reduces contributions of equal size to a single value per element."""

    name: str
    positional: bool
    """True if an element's order depends on its position or its destination."""
    averaging: Averaging
    has_premul: bool
    """True if the backend has PREMUL_SUM, which multiplies each contribution by a factor."""

    def accumulator(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which data of `dtype` is added."""
        ...

    def reduce(self, parts: Sequence[Tensor], fold: Fold, *, at: Stretch) -> Tensor:
        """Reduce a stretch.

        Args:
            parts: Each rank's contribution, 1D, in the accumulator's dtype and in group-rank order.
            fold: The operation.
            at: Position of the elements.

        Returns:
            New memory with the parts' length and dtype.
        """
        ...


def chain(parts: Sequence[Tensor], fold: Fold) -> Tensor:
    """Fold left to right: `((x0 + x1) + x2) + ...`."""
    # A copy, because `fold` may write into its first argument, which is the program's memory.
    total = parts[0].clone(memory_format=torch.contiguous_format)
    for part in parts[1:]:
        total = fold(total, part)
    return total


def chain_pieces(parts: Sequence[Tensor], fold: Fold, pieces: Iterator[Piece]) -> Tensor:
    """Fold each piece left to right in its own rank order. The pieces tile the parts."""
    totals = [
        chain([parts[rank][start:stop] for rank in ranks], fold) for start, stop, ranks in pieces
    ]
    # Without elements there is no piece, but the result still needs new memory.
    if not totals:
        return parts[0].clone()
    return totals[0] if len(totals) == 1 else torch.cat(totals)


def upwards(first: int, rank_count: int) -> tuple[int, ...]:
    """Return all ranks from `first` upwards, modulo `rank_count`."""
    return tuple((first + hop) % rank_count for hop in range(rank_count))


class Linear:
    """Adds in group-rank order. Each addition rounds to the data's dtype."""

    name = "linear"
    positional = False
    averaging: Averaging = "divide"
    has_premul = True

    def accumulator(self, dtype: torch.dtype) -> torch.dtype:
        """Return the data's dtype."""
        return dtype

    def reduce(self, parts: Sequence[Tensor], fold: Fold, *, at: Stretch) -> Tensor:
        """Reduce all elements in the same order."""
        return chain(parts, fold)


class LinearFp32:
    """Adds in group-rank order. 16-bit data is accumulated in fp32 and rounded once at the end."""

    name = "linear-fp32"
    positional = False
    averaging: Averaging = "divide"
    has_premul = True

    def accumulator(self, dtype: torch.dtype) -> torch.dtype:
        """Return fp32 for 16-bit data, otherwise the data's dtype."""
        return torch.float32 if dtype in _SIXTEEN_BIT else dtype

    def reduce(self, parts: Sequence[Tensor], fold: Fold, *, at: Stretch) -> Tensor:
        """Reduce all elements in the same order."""
        return chain(parts, fold)


class Tree:
    """Balanced tree: adds neighbours level by level. A node without neighbour moves up."""

    name = "tree"
    positional = False
    averaging: Averaging = "divide"
    has_premul = True

    def accumulator(self, dtype: torch.dtype) -> torch.dtype:
        """Return the data's dtype."""
        return dtype

    def reduce(self, parts: Sequence[Tensor], fold: Fold, *, at: Stretch) -> Tensor:
        """Reduce all elements in the same order."""
        level = [part.clone(memory_format=torch.contiguous_format) for part in parts]
        while len(level) > 1:
            paired = [fold(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
            level = paired + ([level[-1]] if len(level) % 2 else [])
        return level[0]


# [Note: ring positions] In a ring, the rank where an element ends adds its own contribution last.
# So elements that end on rank `q` are added in the order `x[q+1], x[q+2], ..., x[q]`, modulo the
# group size. In a rooted reduce, elements end on the root; in a reduce-scatter, on their
# destination. An all-reduce cuts the buffer into `world_size` chunks of `ceil(numel / world_size)`.
# Rank `r` sends chunk `r` first, so chunk `c` ends on rank `c - 1` (Patarasuk and Yuan, "Bandwidth
# optimal all-reduce algorithms for clusters of workstations", 2009).
class Ring:
    """The textbook's ring algorithm; see [Note: ring positions].

    `nccl-ring` has the same order for reduce-scatter and rooted reduce, but cuts an all-reduce
    differently and defines AVG differently.
    """

    name = "ring"
    positional = True
    averaging: Averaging = "divide"
    has_premul = True

    def accumulator(self, dtype: torch.dtype) -> torch.dtype:
        """Return the data's dtype."""
        return dtype

    def reduce(self, parts: Sequence[Tensor], fold: Fold, *, at: Stretch) -> Tensor:
        """Start after the rank where the elements end."""
        return chain_pieces(parts, fold, self._pieces(len(parts), parts[0].numel(), at))

    def _pieces(self, rank_count: int, elems: int, at: Stretch) -> Iterator[Piece]:
        if at.destination is not None:
            yield 0, elems, upwards(at.destination + 1, rank_count)
            return
        # An all-reduce: each chunk has its own order. A stretch may start and end inside a chunk.
        chunk_elems = -(-at.buffer_elems // rank_count)
        start = 0
        while start < elems:
            chunk, done = divmod(at.start + start, chunk_elems)
            stop = min(elems, start + chunk_elems - done)
            # Chunk `c` ends on rank `c - 1`, so rank `c` is added first.
            yield start, stop, upwards(chunk, rank_count)
            start = stop


# [Note: random trees] `random-tree` draws a binary tree for each class of elements. An element's
# class is its position in its buffer, modulo `TREE_CLASSES`. Each entry of a coalesced call, and
# each tensor of a list form, is a separate buffer. Draw number `t` of a class is the 8-byte blake2b
# hash of the text `seed/rank count/class/t`, read as a little-endian integer. A tree starts from
# the list of ranks. While the list has `m >= 2` entries, the next draw `d` removes entry `d % m`,
# then, from the rest, entry `d // m % (m - 1)`, and appends their sum. If `d // m // (m - 1)` is
# odd and the data has 16 bits, this sum is kept in fp32. The last sum is always rounded to the
# data's dtype.
@dataclass(frozen=True, slots=True)
class _Joint:
    """A node of a random tree."""

    left: _Joint | int
    """Node or rank."""
    right: _Joint | int
    # True to keep a 16-bit sum in fp32.
    wide: bool


@functools.lru_cache(maxsize=1024)
def _draw_tree(seed: int, rank_count: int, element_class: int) -> _Joint | int:
    """Draw the tree for a class of elements; see [Note: random trees]."""
    nodes: list[_Joint | int] = list(range(rank_count))
    for count in range(rank_count, 1, -1):
        # A hash instead of `random`, because the reference draws the same tree with its own code.
        text = f"{seed}/{rank_count}/{element_class}/{rank_count - count}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        rest, left = divmod(int.from_bytes(digest, "little"), count)
        rest, right = divmod(rest, count - 1)
        nodes.append(_Joint(nodes.pop(left), nodes.pop(right), bool(rest % 2)))
    return nodes[0]


class RandomTree:
    """A random binary tree with random precision per class of elements; see [Note: random trees].

    No backend adds like this. If a system claims that no order changes its bits, it must pass with
    every seed.
    """

    name = "random-tree"
    positional = True
    averaging: Averaging = "divide"
    has_premul = True

    def __init__(self, *, seed: int) -> None:
        self._seed = seed

    def accumulator(self, dtype: torch.dtype) -> torch.dtype:
        """Return the data's dtype. The tree itself keeps some sums in fp32."""
        return dtype

    def reduce(self, parts: Sequence[Tensor], fold: Fold, *, at: Stretch) -> Tensor:
        """Reduce each class of elements with its own tree."""
        out = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
        # Elements of a class are `TREE_CLASSES` apart, so a strided view selects them.
        for first in range(min(TREE_CLASSES, out.numel())):
            root = _draw_tree(self._seed, len(parts), (at.start + first) % TREE_CLASSES)
            total = _fold_tree(root, [part[first::TREE_CLASSES] for part in parts], fold)
            out[first::TREE_CLASSES] = total
        return out


def _fold_tree(node: _Joint | int, parts: Sequence[Tensor], fold: Fold) -> Tensor:
    if isinstance(node, int):
        # `fold` may write into its first argument.
        return parts[node].clone()
    left, right = _fold_tree(node.left, parts, fold), _fold_tree(node.right, parts, fold)
    dtype = parts[0].dtype
    if dtype not in _SIXTEEN_BIT:
        return fold(left, right)
    # Add in fp32. A narrow node rounds at once.
    total = fold(left.float(), right.float())
    return total if node.wide else total.to(dtype)
