"""Arrangements of an NCCL communicator: the tree in which each element of a call is added.

[Note: NCCL's trees]
From the source of NCCL 2.30.7. Parts that no probe of a device has confirmed are a model.
Everything here assumes the protocol Simple, and calls outside of group calls.

- A topology search finds the ring, so its ranks may come in any order. The sum that ends on a rank
  starts at the next rank of the ring. On a single channel, an all-reduce is cut into loops with a
  chunk of half a buffer (2 MiB) per rank. The last loop's chunks are even, rounded up to 16 bytes.
  Chunk c ends at index c of the ring, counted from rank 0.
- Several channels each have a ring and a contiguous part of the elements (of each shard, in a
  reduce-scatter). A call uses only as many channels as give each thread 64 bytes. Parts are whole
  cells of elements, with 32 KiB of traffic per cell.
- Tree adds each element of an all-reduce in the tree of its channel: a chain through the ranks of
  each machine, whose heads form a binary tree. The two trees of a search use different channels.
  Reduce-scatter and reduce have no Tree.
- PAT adds a reduce-scatter in a binomial tree over displacements. At displacement s, rank q - s
  holds a part of rank q's sum and sends it to s with the lowest bit cleared. The order of a node's
  children depends on P, the distance of displacements that are moved at once. Children nearer than
  P come from far to near, then the others from near to far, and the next neighbour last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Tree = tuple[int, ...]
"""A tree of additions in postfix notation: a rank's number pushes its value, and `ADD` adds the
last two."""

ADD = -1
BUFFER_BYTES = 4 << 20
"""Value to which `NCCL_BUFFSIZE` is pinned."""

# Constants of NCCL's source: steps of a buffer, alignment of a chunk, traffic of a cell,
# least bytes for each thread of a channel, least chunk of PAT.
_STEPS = 8
_ALIGN_BYTES = 16
_TRAFFIC_BYTES = 32 << 10
_BYTES_A_THREAD = 64
_PAT_LEAST_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrangement:
    """Additions of one communicator, in group ranks."""

    rings: tuple[tuple[int, ...], ...]
    """Ranks of each channel in ring order, beginning with rank 0."""
    all_reduce: Literal["ring", "tree"] = "ring"
    reduce_scatter: Literal["ring", "pat"] = "ring"
    trees: tuple[Tree, ...] = ()
    """Tree of each channel, if all-reduces use trees."""
    threads: int = 512
    """Threads per channel; ignored for a single channel."""

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Arrangement:
        """Return the arrangement from the result of `as_dict`, also after a round trip by JSON."""
        return cls(
            rings=tuple(tuple(ring) for ring in fields["rings"]),
            all_reduce=fields["all_reduce"],
            reduce_scatter=fields["reduce_scatter"],
            trees=tuple(tuple(tree) for tree in fields["trees"]),
            threads=fields["threads"],
        )


def in_order(rank_count: int) -> Arrangement:
    """Return an arrangement of one channel whose ring is in rank order."""
    return Arrangement(rings=(tuple(range(rank_count)),))


def chain_of(ranks: Sequence[int]) -> Tree:
    """Return the tree that adds ranks in sequence."""
    return (ranks[0], *(step for rank in ranks[1:] for step in (rank, ADD)))


def ring_to(ring: Sequence[int], ends_on: int) -> Tree:
    """Return the tree of the elements that end on a rank of a ring."""
    start = ring.index(ends_on) + 1
    return chain_of([*ring[start:], *ring[:start]])


def pieces(
    arrangement: Arrangement, *, kind: str, elems: int, elem_bytes: int, ends_on: int
) -> Iterator[tuple[int, int, Tree]]:
    """Yield runs of elements of a tensor that share a tree, as (start, stop, tree).

    If a single rank gets the elements, only its elements are covered.

    Args:
        arrangement: The communicator's arrangement.
        kind: Call kind, as in `SumSite`.
        elems: Number of elements of the tensor.
        elem_bytes: Element size, in bytes.
        ends_on: Group rank that gets the elements; ignored if all ranks do.
    """
    rings = arrangement.rings
    rank_count = len(rings[0])
    is_scatter, start, count = kind == "reduce_scatter", 0, elems
    # Each rank gets a shard of the tensor, and channels share out this shard.
    if is_scatter:
        count = elems // rank_count
        start = ends_on * count
    parts = channel_parts(
        kind, count, elem_bytes=elem_bytes, rank_count=rank_count, arrangement=arrangement
    )
    for channel, (first, last) in enumerate(parts):
        if kind == "all_reduce" and arrangement.all_reduce == "tree":
            # Trees alternate between channels.
            yield first, last, arrangement.trees[channel % len(arrangement.trees)]
        elif kind == "all_reduce":
            for one, other, place in _ring_chunks(last - first, elem_bytes, rank_count):
                tree = ring_to(rings[channel], rings[channel][place])
                yield first + one, first + other, tree
        elif is_scatter and arrangement.reduce_scatter == "pat":
            # The tree depends on the number of displacements that fit into a chunk.
            size = (last - first) * elem_bytes
            yield start + first, start + last, pat_tree(ends_on, rank_count, part_bytes=size)
        else:
            yield start + first, start + last, ring_to(rings[channel], ends_on)


def _ring_chunks(elems: int, elem_bytes: int, rank_count: int) -> Iterator[tuple[int, int, int]]:
    """Yield chunks of an all-reduce on a channel, and the ring index on which each ends."""
    full = BUFFER_BYTES // 2 // elem_bytes
    done = 0
    while done < elems:
        left = elems - done
        chunk = full
        # The last loop: even chunks, aligned.
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
    """Return the half-open part of `count` elements that each channel adds.

    Args:
        kind: Call kind, as in `SumSite`.
        count: Number of elements per rank.
        elem_bytes: Element size, in bytes.
        rank_count: Number of ranks in the communicator.
        arrangement: Channels and their threads.
    """
    channels = len(arrangement.rings)
    if channels == 1 or not count:
        return [(0, count)] if count else []
    # Drop channels until each thread has its least number of bytes.
    moved = count * elem_bytes * (rank_count if kind == "reduce_scatter" else 1)
    while channels > 1 and moved < channels * arrangement.threads * _BYTES_A_THREAD:
        channels -= 1
    # Bytes on the wire per byte of payload.
    weight = {"all_reduce": 2, "reduce_scatter": rank_count}.get(kind, 1)
    traffic = max(_TRAFFIC_BYTES, count * elem_bytes * weight)
    cell_bytes = _up(-(-_TRAFFIC_BYTES // weight), 16)
    cells = -(-count * elem_bytes // cell_bytes)
    each = min(cells, -(-_up(traffic // channels, 16) // (cell_bytes * weight)))
    # The last channel of the communicator also takes cells that would need another channel.
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
    """Return the tree of a reduce-scatter by PAT, for one rank's elements on one channel.

    Args:
        ends_on: Group rank that gets the elements.
        rank_count: Number of ranks in the communicator.
        part_bytes: Their size, in bytes.
    """
    # Displacements live in the next power of two; those beyond the ranks have no node.
    power = 1 << (rank_count - 1).bit_length()
    together = pat_together(rank_count, part_bytes=part_bytes)
    return _displaced(0, ends_on, rank_count, power=power, apart=power // together)


def pat_together(rank_count: int, *, part_bytes: int) -> int:
    """Return the number of displacements that PAT moves at once."""
    # Shrink chunks while the call fills less than 16 of them.
    chunk = BUFFER_BYTES // _STEPS
    while chunk * 16 > part_bytes * rank_count and chunk > _PAT_LEAST_BYTES:
        chunk //= 2
    together, depth = 1, _STEPS
    # First fill the chunk with more displacements, then trade depth of the pipeline for them.
    while together < rank_count // 2 and chunk // (part_bytes * together) >= 2:
        together *= 2
    while together < rank_count // 2 and depth > 1:
        together, depth = together * 2, depth // 2
    return together


def _displaced(at: int, ends_on: int, rank_count: int, *, power: int, apart: int) -> Tree:
    # `at or power`: the root has children at all bits.
    lowest = (at & -at or power).bit_length() - 1
    limit = apart.bit_length() - 1
    # Order of the children; see [Note: NCCL's trees].
    if at % apart:
        order = [*range(lowest - 1, -1, -1)]
    else:
        order = [*range(limit - 1, 0, -1), *range(limit, lowest), 0]
    # A node starts with its own value and adds one subtree after the other.
    tree: Tree = ((ends_on - at) % rank_count,)
    for bit in order:
        child = at + (1 << bit)
        if child < rank_count:
            below = _displaced(child, ends_on, rank_count, power=power, apart=apart)
            tree = (*tree, *below, ADD)
    return tree


def add_by_tree(rows: Tensor, tree: Tree) -> Tensor:
    """Add rows [ranks, elements] in a tree, with each sum rounded to their dtype."""
    # Partial sums; the right operand is on top.
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
    """Add consecutive elements of a tensor like a communicator.

    Args:
        rows: 2D (ranks, elements).
        arrangement: The communicator's arrangement.
        kind: Call kind, as in `SumSite`.
        elems: Number of elements of the tensor.
        offset: Offset of the first column in the tensor.
        ends_on: Group rank that gets the elements; ignored if all ranks do.
    """
    out = torch.empty_like(rows[0])
    stop = offset + rows.shape[1]
    for first, last, tree in pieces(
        arrangement, kind=kind, elems=elems, elem_bytes=rows.element_size(), ends_on=ends_on
    ):
        # Clip the run to the columns of `rows`.
        one, other = max(first, offset) - offset, min(last, stop) - offset
        if one < other:
            out[one:other] = add_by_tree(rows[:, one:other], tree)
    return out
