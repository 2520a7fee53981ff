"""Summation orders of real backends, and the table of all orders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from zero_sim.sim.order import (
    Averaging,
    Fold,
    Linear,
    LinearFp32,
    Order,
    Piece,
    RandomTree,
    Ring,
    Stretch,
    Tree,
    chain,
    chain_pieces,
    upwards,
)

# gloo's kMaxSegmentSize; NCCL's chunk size with the Simple protocol, and its chunk alignment.
_GLOO_SEGMENT_BYTES = 1 << 20
_NCCL_CHUNK_BYTES = 2 << 20
_NCCL_ALIGN_BYTES = 16
_WARP_ELEMS = 32


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


# [Note: gloo] Checked bit by bit against real gloo processes (`tests/sim/test_order_gloo.py`),
# torch 2.13. gloo cuts a buffer into segments of at most 1 MiB, at least two per rank. Each rank's
# chunk has the same number of segments. Ranks send chunks downwards, so chunk `c` is added in the
# order `x[c-1], x[c-2], ..., x[c+1], x[c]`, modulo the group size. The cut depends on the *whole*
# buffer's length, so padding, buckets and coalescing change bits.
#
# - A flat reduce-scatter is an all-reduce of a copy, of which each rank keeps its part.
# - A list reduce-scatter is a rooted reduce per entry, which rounds segment sizes differently.
# - A coalesced all-reduce joins all entries. A coalesced reduce-scatter does not.
# - AVG divides the sum. PREMUL_SUM does not exist.
class Gloo:
    """gloo as torch.distributed uses it; see [Note: gloo]."""

    name = "gloo"
    positional = True
    averaging: Averaging = "divide"
    has_premul = False

    def accumulator(self, dtype: torch.dtype) -> torch.dtype:
        """Return the data's dtype."""
        return dtype

    def reduce(self, parts: Sequence[Tensor], fold: Fold, *, at: Stretch) -> Tensor:
        """Add chunk `c` of the whole buffer downwards from rank `c - 1`."""
        rank_count, elem_bytes = len(parts), parts[0].element_size()
        start = at.start
        if at.kind == "all_reduce":
            # gloo joins coalesced entries, so the offset counts from the call's first element.
            chunk_elems, start = _flat_chunk(at.call_elems, elem_bytes, rank_count), at.call_start
        elif at.kind == "reduce_scatter":
            chunk_elems = _flat_chunk(at.buffer_elems, elem_bytes, rank_count)
        else:
            # A list form is a rooted reduce for each entry.
            chunk_elems = _rooted_chunk(at.buffer_elems, elem_bytes, rank_count)
        pieces = _downward_pieces(parts[0].numel(), start, chunk_elems, rank_count)
        return chain_pieces(parts, fold, pieces)


def _flat_chunk(elems: int, elem_bytes: int, rank_count: int) -> int:
    """Return an all-reduce's chunk size in elements."""
    # As in gloo's allreduce: first count segments, then derive their size in bytes.
    total = elems * elem_bytes
    least = max(-(-total // _GLOO_SEGMENT_BYTES), 2 * rank_count)
    segments = _round_up(least, rank_count)
    segment_bytes = _round_up(-(-total // segments), elem_bytes)
    return segments // rank_count * segment_bytes // elem_bytes


def _rooted_chunk(elems: int, elem_bytes: int, rank_count: int) -> int:
    """Return a rooted reduce's chunk size in elements."""
    # As in gloo's reduce: first derive the segment size, then count segments, rounded up to a
    # multiple of the group size.
    total = elems * elem_bytes
    most = min(-(-total // (2 * rank_count)), _GLOO_SEGMENT_BYTES)
    segment_bytes = max(_round_up(most, elem_bytes), elem_bytes)
    segments = _round_up(max(-(-total // segment_bytes), 2 * rank_count), rank_count)
    return segments // rank_count * segment_bytes // elem_bytes


def _downward_pieces(elems: int, offset: int, chunk_elems: int, rank_count: int) -> Iterator[Piece]:
    start = 0
    while start < elems:
        chunk, done = divmod(offset + start, chunk_elems)
        stop = min(elems, start + chunk_elems - done)
        # Reversed, because gloo sends chunks to the rank below.
        yield start, stop, upwards(chunk, rank_count)[::-1]
        start = stop


# [Note: nccl] Derived from NCCL's source (2.30), not observed on a device. `nccl-ring` is the Ring
# algorithm with the Simple protocol on a single channel, over ranks in order: `NCCL_ALGO=Ring`,
# `NCCL_PROTO=Simple`, `NCCL_MAX_CTAS=1`. Elements that end on rank `q` are added in the order
# `x[q+1], x[q+2], ..., x[q]`. An all-reduce is cut into loops of a 2 MiB chunk per rank. In the
# last loop the chunks are equal, rounded up to 16 bytes. Chunk `c` ends on rank `c`. AVG and
# PREMUL_SUM multiply each contribution before the sum.
#
# `nccl-sym` models the kernels for registered windows. The rank that reduces an element adds
# upwards from its own contribution, 16-bit data in fp32, and rounds once. In an all-reduce, ranks
# alternate every 32 elements (a warp), as for small buffers. AVG multiplies the accumulator.
class NcclRing:
    """NCCL's ring on a single channel; see [Note: nccl]."""

    name = "nccl-ring"
    positional = True
    averaging: Averaging = "premultiply"
    has_premul = True

    def accumulator(self, dtype: torch.dtype) -> torch.dtype:
        """Return the data's dtype."""
        return dtype

    def reduce(self, parts: Sequence[Tensor], fold: Fold, *, at: Stretch) -> Tensor:
        """Start after the rank where the elements end."""
        elems, elem_bytes = parts[0].numel(), parts[0].element_size()
        return chain_pieces(parts, fold, self._pieces(len(parts), elems, elem_bytes, at))

    def _pieces(self, rank_count: int, elems: int, elem_bytes: int, at: Stretch) -> Iterator[Piece]:
        if at.destination is not None:
            yield 0, elems, upwards(at.destination + 1, rank_count)
            return
        full_elems = _NCCL_CHUNK_BYTES // elem_bytes
        start = 0
        while start < elems:
            loop, in_loop = divmod(at.start + start, full_elems * rank_count)
            left = at.buffer_elems - loop * full_elems * rank_count
            chunk_elems = full_elems
            # The last loop covers the rest evenly.
            if left < full_elems * rank_count:
                even_elems = -(-left // rank_count)
                chunk_elems = _round_up(even_elems, _NCCL_ALIGN_BYTES // elem_bytes)
            chunk, done = divmod(in_loop, chunk_elems)
            stop = min(elems, start + chunk_elems - done)
            # Chunk `c` ends on rank `c`, not on `c - 1` as in the textbook's ring.
            yield start, stop, upwards(chunk + 1, rank_count)
            start = stop


class NcclSym:
    """NCCL's kernels for symmetric memory; see [Note: nccl]."""

    name = "nccl-sym"
    positional = True
    averaging: Averaging = "postmultiply"
    has_premul = False

    def accumulator(self, dtype: torch.dtype) -> torch.dtype:
        """Return fp32 for 16-bit floats, otherwise the data's dtype."""
        return torch.float32 if dtype.itemsize == 2 and dtype.is_floating_point else dtype

    def reduce(self, parts: Sequence[Tensor], fold: Fold, *, at: Stretch) -> Tensor:
        """Start at the rank that reduces the elements."""
        rank_count, elems = len(parts), parts[0].numel()
        if at.destination is not None:
            return chain([parts[rank] for rank in upwards(at.destination, rank_count)], fold)
        # An all-reduce: the starting rank changes each warp, so gather by hop instead of by rank.
        stacked = torch.stack(list(parts))
        # stacked [ranks, elems]; turns [elems], modulo rank_count the rank that reduces an element
        positions = torch.arange(at.start, at.start + elems, device=stacked.device)
        turns = positions.div(_WARP_ELEMS, rounding_mode="floor")
        hops = [
            stacked.gather(0, turns.add(hop).remainder(rank_count).unsqueeze(0)).squeeze(0)
            for hop in range(rank_count)
        ]
        return chain(hops, fold)


ORDERS: dict[str, Callable[[int], Order]] = {
    "linear": lambda seed: Linear(),
    "linear-fp32": lambda seed: LinearFp32(),
    "tree": lambda seed: Tree(),
    "ring": lambda seed: Ring(),
    "gloo": lambda seed: Gloo(),
    "nccl-ring": lambda seed: NcclRing(),
    "nccl-sym": lambda seed: NcclSym(),
    "random-tree": lambda seed: RandomTree(seed=seed),
}
"""Constructors by name. They take the world's seed, which only `random-tree` uses."""
