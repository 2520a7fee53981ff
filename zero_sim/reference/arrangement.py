"""Arrangements of a communicator of NCCL: in which tree each element of a call is added.

[Note: what NCCL's source says]
Read in NCCL 2.30.7; what a probe of a device has not confirmed is a model and no fact. All of it is
of the protocol Simple and of calls that are no part of a group of calls.

- A ring is found by a search of the machine's topology, so its ranks may come in any order. What is
  to end on one rank starts at the next one of the ring. An all-reduce on one channel is cut into
  loops of a chunk of half a buffer (2 MiB) for each rank; the last loop's chunks are even, rounded
  up to 16 bytes; chunk c ends at place c of the ring, counted from rank 0.
- Several channels have a ring each, and a contiguous part of the elements (of each shard, in a
  reduce-scatter). A call uses as many channels as it has bytes for, 64 for each of their threads.
  Parts are whole cells of elements, of 32 KiB of traffic.
- Tree adds every element of an all-reduce on a channel in that channel's tree: a chain through the
  ranks of a machine, whose heads are joined in a binary tree. The two trees of a search are on
  channels of their own. Reduce-scatter and reduce have no Tree.
- PAT adds a reduce-scatter in a binomial tree over displacements: rank q - s holds what q gets at
  displacement s, which sends to s with its lowest bit cleared. Which of its children a node hears
  first depends on how many displacements are moved at once: of D, those below the lowest bit come
  from the far ones to the near ones, the others from the near ones to the far ones, and the next
  neighbour last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Tree = tuple[int, ...]
"""A tree of additions, leaves first: a rank stands for its number, `ADD` for the sum of the last
two."""

ADD = -1
BUFFER_BYTES = 4 << 20
"""What `NCCL_BUFFSIZE` is pinned to."""

_STEPS = 8
_ALIGN_BYTES = 16
_TRAFFIC_BYTES = 32 << 10
_BYTES_A_THREAD = 64
_PAT_LEAST_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrangement:
    """How one communicator adds, in ranks within it."""

    rings: tuple[tuple[int, ...], ...]
    """Of each channel, the ranks in the order of its ring, from rank 0 on."""
    all_reduce: Literal["ring", "tree"] = "ring"
    reduce_scatter: Literal["ring", "pat"] = "ring"
    trees: tuple[Tree, ...] = ()
    """Of each channel, its tree, where all-reduces use trees."""
    threads: int = 512
    """Of a channel; not read where there is one channel."""

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Arrangement:
        """What `as_dict` gave, also by way of JSON."""
        return cls(
            rings=tuple(tuple(ring) for ring in told["rings"]),
            all_reduce=told["all_reduce"],
            reduce_scatter=told["reduce_scatter"],
            trees=tuple(tuple(tree) for tree in told["trees"]),
            threads=told["threads"],
        )


def in_order(rank_count: int) -> Arrangement:
    """One ring on one channel, of ranks in their own order."""
    return Arrangement(rings=(tuple(range(rank_count)),))


def chain_of(ranks: Sequence[int]) -> Tree:
    """The tree that adds ranks one after another."""
    return (ranks[0], *(step for rank in ranks[1:] for step in (rank, ADD)))


def ring_to(ring: Sequence[int], ends_on: int) -> Tree:
    """The tree of what ends on a rank of a ring."""
    start = ring.index(ends_on) + 1
    return chain_of([*ring[start:], *ring[:start]])


def pieces(
    arrangement: Arrangement, *, kind: str, elems: int, elem_bytes: int, ends_on: int
) -> Iterator[tuple[int, int, Tree]]:
    """Runs of elements of one tensor that are added alike, with their tree.

    Where one rank alone gets elements, they are those of that rank.

    Args:
        arrangement: Of the communicator.
        kind: Of the call, as in `SumSite`.
        elems: Of the tensor.
        elem_bytes: Size of an element.
        ends_on: Rank that gets the elements; not read where all do.
    """
    rings = arrangement.rings
    rank_count = len(rings[0])
    is_scatter, start, count = kind == "reduce_scatter", 0, elems
    if is_scatter:
        count = elems // rank_count
        start = ends_on * count
    parts = channel_parts(
        kind, count, elem_bytes=elem_bytes, rank_count=rank_count, arrangement=arrangement
    )
    for channel, (first, last) in enumerate(parts):
        if kind == "all_reduce" and arrangement.all_reduce == "tree":
            yield first, last, arrangement.trees[channel % len(arrangement.trees)]
        elif kind == "all_reduce":
            for one, other, place in _ring_chunks(last - first, elem_bytes, rank_count):
                tree = ring_to(rings[channel], rings[channel][place])
                yield first + one, first + other, tree
        elif is_scatter and arrangement.reduce_scatter == "pat":
            size = (last - first) * elem_bytes
            yield start + first, start + last, pat_tree(ends_on, rank_count, part_bytes=size)
        else:
            yield start + first, start + last, ring_to(rings[channel], ends_on)


def _ring_chunks(elems: int, elem_bytes: int, rank_count: int) -> Iterator[tuple[int, int, int]]:
    """Chunks of an all-reduce on a channel, and the place of the ring where each ends."""
    full = BUFFER_BYTES // 2 // elem_bytes
    done = 0
    while done < elems:
        left = elems - done
        chunk = full
        if left < full * rank_count:
            even = -(-left // rank_count) * elem_bytes
            chunk = -(-even // _ALIGN_BYTES) * _ALIGN_BYTES // elem_bytes
        for place in range(rank_count):
            first = done + place * chunk
            last = min(elems, first + chunk)
            if first < last:
                yield first, last, place
        done += full * rank_count


def channel_parts(
    kind: str, count: int, *, elem_bytes: int, rank_count: int, arrangement: Arrangement
) -> list[tuple[int, int]]:
    """The half-open part of `count` elements that each channel adds.

    Args:
        kind: Of the call.
        count: Elements that a rank gets.
        elem_bytes: Size of an element.
        rank_count: Ranks of the communicator.
        arrangement: Says how many channels, and their threads.
    """
    channels = len(arrangement.rings)
    if channels == 1 or not count:
        return [(0, count)] if count else []
    moved = count * elem_bytes * (rank_count if kind == "reduce_scatter" else 1)
    while channels > 1 and moved < channels * arrangement.threads * _BYTES_A_THREAD:
        channels -= 1
    weight = {"all_reduce": 2, "reduce_scatter": rank_count}.get(kind, 1)
    traffic = max(_TRAFFIC_BYTES, count * elem_bytes * weight)
    cell_bytes = _up(-(-_TRAFFIC_BYTES // weight), 16)
    cells = -(-count * elem_bytes // cell_bytes)
    each = min(cells, -(-_up(traffic // channels, 16) // (cell_bytes * weight)))
    # The communicator's last channel takes whatever would need one more.
    sizes = [each] * (cells // each) + ([cells % each] if cells % each else [])
    limit = len(arrangement.rings)
    if len(sizes) > limit:
        rest = cells - each
        middle = rest // (limit - 1)
        sizes = [each, *[middle] * (limit - 2), middle + rest % (limit - 1)]
    cell_elems, parts, start = cell_bytes // elem_bytes, [], 0
    for size in sizes:
        stop = min(count, start + size * cell_elems)
        parts.append((start, stop))
        start = stop
    return parts


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def pat_tree(ends_on: int, rank_count: int, *, part_bytes: int) -> Tree:
    """The tree of a reduce-scatter by PAT, for what one rank gets on one channel.

    Args:
        ends_on: The rank that gets it.
        rank_count: Ranks of the communicator.
        part_bytes: Size of what it gets.
    """
    power = 1 << (rank_count - 1).bit_length()
    together = pat_together(rank_count, part_bytes=part_bytes)
    return _displaced(0, ends_on, rank_count, power=power, apart=power // together)


def pat_together(rank_count: int, *, part_bytes: int) -> int:
    """How many displacements PAT moves at once."""
    chunk = BUFFER_BYTES // _STEPS
    while chunk * 16 > part_bytes * rank_count and chunk > _PAT_LEAST_BYTES:
        chunk //= 2
    together, depth = 1, _STEPS
    while together < rank_count // 2 and chunk // (part_bytes * together) >= 2:
        together *= 2
    while together < rank_count // 2 and depth > 1:
        together, depth = together * 2, depth // 2
    return together


def _displaced(at: int, ends_on: int, rank_count: int, *, power: int, apart: int) -> Tree:
    lowest = (at & -at or power).bit_length() - 1
    limit = apart.bit_length() - 1
    if at % apart:
        order = [*range(lowest - 1, -1, -1)]
    else:
        order = [*range(limit - 1, 0, -1), *range(limit, lowest), 0]
    tree: Tree = ((ends_on - at) % rank_count,)
    for bit in order:
        child = at + (1 << bit)
        if child < rank_count:
            below = _displaced(child, ends_on, rank_count, power=power, apart=apart)
            tree = (*tree, *below, ADD)
    return tree


def add_by_tree(rows: Tensor, tree: Tree) -> Tensor:
    """Add rows (ranks, elements) in a tree, each sum rounded to their dtype."""
    stack: list[Tensor] = []
    for step in tree:
        if step != ADD:
            stack.append(rows[step])
            continue
        right = stack.pop()
        stack.append(stack.pop() + right)
    return stack.pop()


def add_arranged(
    rows: Tensor, arrangement: Arrangement, *, kind: str, elems: int, offset: int, ends_on: int
) -> Tensor:
    """Add consecutive elements of a tensor as a communicator does.

    Args:
        rows: 2D (ranks, elements).
        arrangement: Of the communicator.
        kind: Of the call, as in `SumSite`.
        elems: Of the tensor.
        offset: Of the first of these elements in it.
        ends_on: Rank that gets them; not read where all do.
    """
    out = torch.empty_like(rows[0])
    stop = offset + rows.shape[1]
    for first, last, tree in pieces(
        arrangement, kind=kind, elems=elems, elem_bytes=rows.element_size(), ends_on=ends_on
    ):
        one, other = max(first, offset) - offset, min(last, stop) - offset
        if one < other:
            out[one:other] = add_by_tree(rows[:, one:other], tree)
    return out
