"""Order and precision in which a reduction adds the ranks' contributions.

Floating-point addition does not associate, so the bits of a reduction are defined only for a named
order. Each model is an explicit chain of operations. Each operation rounds to the data's dtype,
unless the model names a wider accumulator. `.sum(0)` is never used, because torch may change its
association.

This module has the orders of textbooks and tests, `order_backends` those of real backends. The
reference implements the same definitions separately.
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
"""Combines two contributions elementwise; may reuse the first one's memory."""

Averaging = Literal["divide", "premultiply", "postmultiply"]
"""Definition of AVG. `divide`: one true division of the sum, in the data's dtype. `premultiply`:
each contribution times 1 / world size before the sum, both rounded to the data's dtype.
`postmultiply`: the accumulator times the fp32 reciprocal, before rounding to the data's dtype."""

Piece = tuple[int, int, Sequence[int]]
"""Half-open range of elements, and the ranks in the order of addition there."""

TREE_CLASSES = 7
_SIXTEEN_BIT = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Consecutive elements that one call reduces, and their position in it."""

    kind: str
    """`all_reduce`, `reduce`, `reduce_scatter` or `reduce_scatter_list`."""
    buffer_elems: int
    """Elements of the tensor that contains them."""
    start: int = 0
    """Offset of the first element in that tensor."""
    call_elems: int
    """Elements of all tensors of the call; more than `buffer_elems` in a coalesced one."""
    call_start: int = 0
    """Offset of the first element in all tensors of the call, one after another."""
    destination: int | None = None
    """Group rank that gets the result; None if all ranks do."""


class Order(Protocol):
    """An order model: reduces equal-sized contributions to one value per element."""

    name: str
    positional: bool
    """True if an element's order depends on its position, and so on its destination."""
    averaging: Averaging
    has_premul: bool
    """True if PREMUL_SUM exists, which multiplies each contribution by the call's factor."""

    def accumulator(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which data of `dtype` is added."""
        ...

    def reduce(self, parts: Sequence[Tensor], fold: Fold, *, at: Stretch) -> Tensor:
        """Reduce one stretch.

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
    # A copy: `fold` may write into its first argument, which is the program's memory.
    total = parts[0].clone(memory_format=torch.contiguous_format)
    for part in parts[1:]:
        total = fold(total, part)
    return total


def chain_pieces(parts: Sequence[Tensor], fold: Fold, pieces: Iterator[Piece]) -> Tensor:
    """Fold each piece left to right in its own rank order. The pieces tile the parts."""
    totals = [
        chain([parts[rank][start:stop] for rank in ranks], fold) for start, stop, ranks in pieces
    ]
    # Without elements there is no piece, but the result still needs memory of its own.
    if not totals:
        return parts[0].clone()
    return totals[0] if len(totals) == 1 else torch.cat(totals)


def upwards(first: int, rank_count: int) -> tuple[int, ...]:
    """Return the ranks from `first` upwards, wrapping around to the rank before it."""
    return tuple((first + hop) % rank_count for hop in range(rank_count))


class Linear:
    """Group-rank order; each addition rounds to the data's dtype."""

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
    """Group-rank order; 16-bit data is accumulated in fp32 and rounded once at the end."""

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
    """Balanced pairwise tree: combines neighbours level by level; an odd one moves up."""

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
# So elements that end on rank `q` are added in the order `x[q+1], x[q+2], ..., x[q]`, indices
# modulo the group size. In a rooted reduce, elements end on the root; in a reduce-scatter, on their
# destination. An all-reduce cuts the buffer into `world_size` chunks of `ceil(numel / world_size)`.
# Rank `r` sends chunk `r` first, so chunk `c` ends on rank `c - 1` (Patarasuk and Yuan, "Bandwidth
# optimal all-reduce algorithms for clusters of workstations", 2009).
class Ring:
    """The textbook's ring algorithm; see [Note: ring positions].

    `nccl-ring` uses the same order for a reduce-scatter and a rooted reduce. It differs in the cut
    of an all-reduce and in AVG.
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
        # An all-reduce: each chunk has its own order. A stretch may start and end inside of a
        # chunk.
        chunk_elems = -(-at.buffer_elems // rank_count)
        start = 0
        while start < elems:
            chunk, done = divmod(at.start + start, chunk_elems)
            stop = min(elems, start + chunk_elems - done)
            # Chunk `c` ends on rank `c - 1`, so rank `c` is added first.
            yield start, stop, upwards(chunk, rank_count)
            start = stop


# [Note: random trees] `random-tree` draws one binary tree per class of elements. An element's class
# is its position in its buffer, modulo `TREE_CLASSES`. Each entry of a coalesced call is a buffer
# of its own, and so is each tensor that a list form sends to one rank. Draw number `t` of a class
# is the 8-byte blake2b hash of the text `seed/rank count/class/t`, read as a little-endian integer.
# A tree starts from the list of ranks. While the list has `m >= 2` entries, the next draw `d`
# removes entry `d % m`, then, from the rest, entry `d // m % (m - 1)`, and appends their sum. If `d
# // m // (m - 1)` is odd and the data has 16 bits, this sum is kept in fp32. The last sum is always
# rounded to the data's dtype.
@dataclass(frozen=True, slots=True)
class _Joint:
    """A node of a random tree."""

    left: _Joint | int
    """Node or rank."""
    right: _Joint | int
    # True if a 16-bit sum is kept in fp32.
    wide: bool


@functools.lru_cache(maxsize=1024)
def _draw_tree(seed: int, rank_count: int, element_class: int) -> _Joint | int:
    """Draw the tree of one class of elements; see [Note: random trees]."""
    nodes: list[_Joint | int] = list(range(rank_count))
    for count in range(rank_count, 1, -1):
        # A hash rather than `random`: the reference must draw the same from its own code.
        text = f"{seed}/{rank_count}/{element_class}/{rank_count - count}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        rest, left = divmod(int.from_bytes(digest, "little"), count)
        rest, right = divmod(rest, count - 1)
        nodes.append(_Joint(nodes.pop(left), nodes.pop(right), bool(rest % 2)))
    return nodes[0]


class RandomTree:
    """A random binary tree and random precision per class of elements: the adversary.

    No backend adds like this. If a system claims bits that no order can change, it must pass under
    every seed. See [Note: random trees].
    """

    name = "random-tree"
    positional = True
    averaging: Averaging = "divide"
    has_premul = True

    def __init__(self, *, seed: int) -> None:
        self._seed = seed

    def accumulator(self, dtype: torch.dtype) -> torch.dtype:
        """Return the data's dtype. The tree widens some sums itself."""
        return dtype

    def reduce(self, parts: Sequence[Tensor], fold: Fold, *, at: Stretch) -> Tensor:
        """Reduce each class of elements by its own tree."""
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
    # One fp32 addition of 16-bit values; a narrow node rounds it at once.
    total = fold(left.float(), right.float())
    return total if node.wide else total.to(dtype)
