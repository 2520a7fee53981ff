"""In which order, and how precisely, a reduction adds the ranks' contributions.

Floating-point addition does not associate, so a reduction has bits only once its order is named.
Every model is written as explicit chained operations, each rounded to the dtype of the data unless
the model names a wider accumulator; never `.sum(0)`, whose association torch may change.

This module holds the orders of textbooks and of tests; `order_backends` those of real backends.
The reference holds its own, separate implementation of the same definitions.

[Note: ring positions]
A ring adds the elements that end on rank `q` in the order `x[q+1], x[q+2], ..., x[q]` (indices
modulo the group size): the rank on which they end adds its own contribution last. In a rooted
reduce they end on the root and in a reduce-scatter on their destination. An all-reduce cuts the
buffer into `world_size` chunks of `ceil(numel / world_size)`, and rank `r` sends chunk `r` first,
so chunk `c` ends on rank `c - 1` (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for
clusters of workstations", 2009).

[Note: random trees]
`random-tree` draws one binary tree for each class of elements; the class is the place of the
element in its buffer, modulo `TREE_CLASSES`. An entry of a coalesced call is a buffer of its own,
and so is the tensor that a list form sends to one rank. Draw number `t` of a class is the integer
that the 8-byte blake2b hash of the text `seed/rank count/class/t` spells, little end first. A tree
starts from the list of ranks. While it has two entries or more, of which there are `m`, the next
draw `d` takes out entry `d % m`, then, of those left, entry `d // m % (m - 1)`, and puts the sum of
the two at the end. Where `d // m // (m - 1)` is odd and the data has 16 bits, that sum is kept in
fp32; the last one is rounded to the data's dtype in any case.
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
"""What AVG is. `divide`: one true division of the sum in the data's dtype; `premultiply`: every
contribution times 1 / world size, both rounded to the data's dtype, before the sum; `postmultiply`:
the accumulator times the fp32 reciprocal, before it is rounded to the data's dtype."""

Piece = tuple[int, int, Sequence[int]]
"""Half-open range of elements, and the ranks in the order in which they are added there."""

TREE_CLASSES = 7
_SIXTEEN_BIT = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Consecutive elements that one call reduces, and where they stand in it."""

    kind: str
    """`all_reduce`, `reduce`, `reduce_scatter` or `reduce_scatter_list`."""
    buffer_elems: int
    """Elements of the tensor that they are part of."""
    start: int = 0
    """Offset of the first one in that tensor."""
    call_elems: int
    """Elements of all tensors of the call; more than `buffer_elems` in a coalesced one."""
    call_start: int = 0
    """Offset of the first one in all of these, one after another."""
    destination: int | None = None
    """Group rank that gets the result; None where all do."""


class Order(Protocol):
    """An order model: how contributions that all hold the same elements become one value each."""

    name: str
    positional: bool
    """Whether an element's order depends on where it stands, and so on its destination."""
    averaging: Averaging
    has_premul: bool
    """Whether there is a PREMUL_SUM, which multiplies each contribution by the call's factor."""

    def accumulator(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which data of `dtype` is added."""
        ...

    def reduce(self, parts: Sequence[Tensor], fold: Fold, *, at: Stretch) -> Tensor:
        """Reduce one stretch.

        Args:
            parts: Each rank's contribution, 1D, in the accumulator's dtype; in group-rank order.
            fold: The operation.
            at: Where the elements stand.

        Returns:
            New memory of the parts' length and dtype.
        """
        ...


def chain(parts: Sequence[Tensor], fold: Fold) -> Tensor:
    """Fold left to right: `((x0 + x1) + x2) + ...`."""
    total = parts[0].clone(memory_format=torch.contiguous_format)
    for part in parts[1:]:
        total = fold(total, part)
    return total


def chain_pieces(parts: Sequence[Tensor], fold: Fold, pieces: Iterator[Piece]) -> Tensor:
    """Fold each piece left to right in its own order of ranks; the pieces tile the parts."""
    totals = [
        chain([parts[rank][start:stop] for rank in ranks], fold) for start, stop, ranks in pieces
    ]
    if not totals:
        return parts[0].clone()
    return totals[0] if len(totals) == 1 else torch.cat(totals)


def upwards(first: int, rank_count: int) -> tuple[int, ...]:
    """`first`, `first + 1`, ... and round to the rank before it."""
    return tuple((first + hop) % rank_count for hop in range(rank_count))


class Linear:
    """Group-rank order, one rounding to the data's dtype at each addition."""

    name = "linear"
    positional = False
    averaging: Averaging = "divide"
    has_premul = True

    def accumulator(self, dtype: torch.dtype) -> torch.dtype:
        """The data's own."""
        return dtype

    def reduce(self, parts: Sequence[Tensor], fold: Fold, *, at: Stretch) -> Tensor:
        """The same order for every element."""
        return chain(parts, fold)


class LinearFp32:
    """Group-rank order with an fp32 accumulator for 16-bit data, rounded once at the end."""

    name = "linear-fp32"
    positional = False
    averaging: Averaging = "divide"
    has_premul = True

    def accumulator(self, dtype: torch.dtype) -> torch.dtype:
        """At least fp32."""
        return torch.float32 if dtype in _SIXTEEN_BIT else dtype

    def reduce(self, parts: Sequence[Tensor], fold: Fold, *, at: Stretch) -> Tensor:
        """The same order for every element."""
        return chain(parts, fold)


class Tree:
    """Balanced pairwise: neighbours are combined level by level, an odd one moves up alone."""

    name = "tree"
    positional = False
    averaging: Averaging = "divide"
    has_premul = True

    def accumulator(self, dtype: torch.dtype) -> torch.dtype:
        """The data's own."""
        return dtype

    def reduce(self, parts: Sequence[Tensor], fold: Fold, *, at: Stretch) -> Tensor:
        """The same order for every element."""
        level = [part.clone(memory_format=torch.contiguous_format) for part in parts]
        while len(level) > 1:
            paired = [fold(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
            level = paired + ([level[-1]] if len(level) % 2 else [])
        return level[0]


class Ring:
    """The ring algorithm of the textbook; see [Note: ring positions].

    `nccl-ring` adds a reduce-scatter and a rooted reduce in the same order. It differs in how an
    all-reduce is cut, and in what AVG is.
    """

    name = "ring"
    positional = True
    averaging: Averaging = "divide"
    has_premul = True

    def accumulator(self, dtype: torch.dtype) -> torch.dtype:
        """The data's own."""
        return dtype

    def reduce(self, parts: Sequence[Tensor], fold: Fold, *, at: Stretch) -> Tensor:
        """Starts behind the rank on which the elements end."""
        return chain_pieces(parts, fold, self._pieces(len(parts), parts[0].numel(), at))

    def _pieces(self, rank_count: int, elems: int, at: Stretch) -> Iterator[Piece]:
        if at.destination is not None:
            yield 0, elems, upwards(at.destination + 1, rank_count)
            return
        chunk_elems = -(-at.buffer_elems // rank_count)
        start = 0
        while start < elems:
            chunk, done = divmod(at.start + start, chunk_elems)
            stop = min(elems, start + chunk_elems - done)
            yield start, stop, upwards(chunk, rank_count)
            start = stop


@dataclass(frozen=True, slots=True)
class _Joint:
    """A node of a random tree."""

    left: _Joint | int
    """A node, or a rank."""
    right: _Joint | int
    wide: bool


@functools.lru_cache(maxsize=1024)
def _draw_tree(seed: int, rank_count: int, element_class: int) -> _Joint | int:
    """The tree of one class of elements; see [Note: random trees]."""
    nodes: list[_Joint | int] = list(range(rank_count))
    for count in range(rank_count, 1, -1):
        text = f"{seed}/{rank_count}/{element_class}/{rank_count - count}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        rest, left = divmod(int.from_bytes(digest, "little"), count)
        rest, right = divmod(rest, count - 1)
        nodes.append(_Joint(nodes.pop(left), nodes.pop(right), bool(rest % 2)))
    return nodes[0]


class RandomTree:
    """A binary tree drawn for each class of elements, precision included: the adversary.

    No backend adds like this. A system that claims bits which no order can change must pass under
    every seed; see [Note: random trees].
    """

    name = "random-tree"
    positional = True
    averaging: Averaging = "divide"
    has_premul = True

    def __init__(self, *, seed: int) -> None:
        self._seed = seed

    def accumulator(self, dtype: torch.dtype) -> torch.dtype:
        """The data's own; the tree widens some of its sums."""
        return dtype

    def reduce(self, parts: Sequence[Tensor], fold: Fold, *, at: Stretch) -> Tensor:
        """Each class of elements by its own tree."""
        out = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
        for first in range(min(TREE_CLASSES, out.numel())):
            root = _draw_tree(self._seed, len(parts), (at.start + first) % TREE_CLASSES)
            total = _fold_tree(root, [part[first::TREE_CLASSES] for part in parts], fold)
            out[first::TREE_CLASSES] = total
        return out


def _fold_tree(node: _Joint | int, parts: Sequence[Tensor], fold: Fold) -> Tensor:
    if isinstance(node, int):
        return parts[node].clone()
    left, right = _fold_tree(node.left, parts, fold), _fold_tree(node.right, parts, fold)
    dtype = parts[0].dtype
    if dtype not in _SIXTEEN_BIT:
        return fold(left, right)
    total = fold(left.float(), right.float())
    return total if node.wide else total.to(dtype)
