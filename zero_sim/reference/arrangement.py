"""NCCL communicator arrangements: the tree in which each element is added.

[Note: NCCL's trees]
Derived from the NCCL 2.30.7 source. Parts that no device probe has confirmed are a model. All of it
assumes the Simple protocol, and calls outside group calls.

- Ring: a topology search finds it, so ranks may come in any order. A sum that ends on a rank starts
  at the next rank in the ring. On a single channel, an all-reduce is cut into loops with one chunk
  per rank, half a buffer (2 MiB) long. The last loop has even chunks, rounded up to 16 bytes. Chunk
  c ends at ring index c, counted from rank 0.
- Channels: each has its own ring, and adds a contiguous part of the elements (in a reduce-scatter,
  of each shard). A call uses only as many channels as give each thread 64 bytes. Parts are whole
  cells, with 32 KiB of traffic per cell.
- Tree: an all-reduce adds each element in its channel's tree, with a chain through each machine's
  ranks and a binary tree over the chain heads. A search finds two trees, which alternate between
  channels. Reduce-scatter and reduce never use Tree.
- PAT: a reduce-scatter adds in a binomial tree over displacements. At displacement s, rank q - s
  holds part of rank q's sum, and sends it to displacement s with its lowest bit cleared. Child
  order depends on P, the distance between displacements that move together. Children nearer than P
  come first, from far to near, then the others from near to far, and the next neighbour last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Tree = tuple[int, ...]
"""An addition tree in postfix notation: a rank pushes its value, and `ADD` adds the top two."""

ADD = -1
BUFFER_BYTES = 4 << 20
"""Value to which `NCCL_BUFFSIZE` is pinned."""

# Constants in NCCL's source: steps per buffer, chunk alignment, cell traffic, least bytes per
# channel thread, least PAT chunk.
_STEPS = 8
_ALIGN_BYTES = 16
_TRAFFIC_BYTES = 32 << 10
_BYTES_A_THREAD = 64
_PAT_LEAST_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrangement:
    """Order of additions in one communicator, in group ranks."""

    rings: tuple[tuple[int, ...], ...]
    """Each channel's ring, beginning with rank 0."""
    all_reduce: Literal["ring", "tree"] = "ring"
    reduce_scatter: Literal["ring", "pat"] = "ring"
    trees: tuple[Tree, ...] = ()
    """Trees that channels use in turn, if all-reduces use trees."""
    threads: int = 512
    """Threads per channel; ignored for a single channel."""

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Arrangement:
        """Rebuild an arrangement from `as_dict`, also after a JSON round trip."""
        return cls(
            rings=tuple(tuple(ring) for ring in fields["rings"]),
            all_reduce=fields["all_reduce"],
            reduce_scatter=fields["reduce_scatter"],
            trees=tuple(tuple(tree) for tree in fields["trees"]),
            threads=fields["threads"],
        )


def in_order(rank_count: int) -> Arrangement:
    """Return a single-channel arrangement with its ring in rank order."""
    return Arrangement(rings=(tuple(range(rank_count)),))


def chain_of(ranks: Sequence[int]) -> Tree:
    """Return the tree that adds ranks in sequence."""
    return (ranks[0], *(step for rank in ranks[1:] for step in (rank, ADD)))


def ring_to(ring: Sequence[int], ends_on: int) -> Tree:
    """Return a ring's tree for elements that end on a given rank."""
    start = ring.index(ends_on) + 1
    return chain_of([*ring[start:], *ring[:start]])


def pieces(
    arrangement: Arrangement, *, kind: str, elems: int, elem_bytes: int, ends_on: int
) -> Iterator[tuple[int, int, Tree]]:
    """Yield runs of elements that share a tree, as (start, stop, tree).

    A reduce-scatter only covers the elements that `ends_on` gets.

    Args:
        arrangement: The communicator's arrangement.
        kind: Call kind, as in `SumSite`.
        elems: Elements in the tensor.
        elem_bytes: Element size, in bytes.
        ends_on: Group rank that gets the elements; ignored if all ranks do.
    """
    rings = arrangement.rings
    rank_count = len(rings[0])
    is_scatter, start, count = kind == "reduce_scatter", 0, elems
    # Each rank gets one shard, and channels divide this shard.
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
    """Yield a channel's all-reduce chunks, each with the ring index on which it ends."""
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
    """Return each channel's half-open part of `count` elements.

    Args:
        kind: Call kind, as in `SumSite`.
        count: Elements per rank.
        elem_bytes: Element size, in bytes.
        rank_count: Ranks in the communicator.
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
    sizes = [each] * (cells // each) + ([cells % each] if cells % each else [])
    limit = len(arrangement.rings)
    # Too many parts: the first channel keeps its cells, and the others share the rest.
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
    """Return PAT's tree for one rank's elements on one channel."""
    # Displacements live in the next power of two; those beyond the ranks have no node.
    power = 1 << (rank_count - 1).bit_length()
    together = pat_together(rank_count, part_bytes=part_bytes)
    return _displaced(0, ends_on, rank_count, power=power, apart=power // together)


def pat_together(rank_count: int, *, part_bytes: int) -> int:
    """Return the number of displacements that PAT moves together."""
    # Shrink chunks while the call fills less than 16 of them.
    chunk = BUFFER_BYTES // _STEPS
    while chunk * 16 > part_bytes * rank_count and chunk > _PAT_LEAST_BYTES:
        chunk //= 2
    together, depth = 1, _STEPS
    # First fill the chunk with more displacements, then trade pipeline depth for them.
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
    """Add consecutive elements of a tensor like a communicator; arguments as for `pieces`.

    `rows` is [ranks, elements], and `offset` is its first column's offset in the tensor.
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
