"""Arrangement of a communicator, recovered from a probe's observations.

Rings show in reduce-scatters, and trees in all-reduces. The assembled arrangement must reproduce
each observed tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist

from zero_sim.backends.probe import ObservedOrder, by_calling, observe
from zero_sim.backends.probe_models import text_of, tree_of
from zero_sim.reference import Arrangement
from zero_sim.reference.arrangement import ADD, Tree, in_order, pieces

ELEMS_A_RANK = 5
"""Elements per rank in observed calls: enough to distinguish the chunks of an all-reduce."""
CHANNELS_MAX = 64
"""Largest channel count of an NCCL communicator."""


def arrangement_of(group: dist.ProcessGroup, *, device: str) -> tuple[Arrangement | None, str]:
    """Determine a communicator's summation order. All of its ranks must call this.

    Returns:
        Arrangement, or None if no model fits; and a description of the observations.
    """
    size, dtype = group.size(), torch.float32
    elems = ELEMS_A_RANK * size
    # Both kinds, because a ring shows in one and a tree only in the other.
    scattered, reduced = (
        observe(
            by_calling(kind, group=group, elems=elems, device=device),
            rank_count=size,
            elems=elems,
            dtype=dtype,
        )
        for kind in ("reduce_scatter", "all_reduce")
    )
    words = (
        f"reduce-scatter {_in_words(scattered)}, all-reduce {_in_words(reduced)}, partial sums "
        f"{scattered.accumulator} and {reduced.accumulator}"
    )
    return fit(scattered, reduced, rank_count=size, elems=elems, elem_bytes=4), words


def _in_words(observed: ObservedOrder) -> str:
    runs = list(zip(observed.starts, observed.trees, strict=True))
    shown = ", ".join(f"{tree} from element {start}" for start, tree in runs[:4])
    return f"{shown} and {len(runs) - 4} more" if len(runs) > 4 else shown


def fit(
    scattered: ObservedOrder,
    reduced: ObservedOrder,
    *,
    rank_count: int,
    elems: int,
    elem_bytes: int,
) -> Arrangement | None:
    """Return the one-channel arrangement that reproduces all observations; None if none does."""
    # NCCL keeps partial sums of fp32 in fp32, so no model here fits anything else.
    if (scattered.accumulator, reduced.accumulator) != ("data", "data"):
        return None
    for candidate in _candidates(scattered, reduced, rank_count=rank_count):
        if all(
            _gives(candidate, observed, kind=kind, elems=elems, elem_bytes=elem_bytes)
            for kind, observed in (("reduce_scatter", scattered), ("all_reduce", reduced))
        ):
            return candidate
    return None


def with_channels(arrangement: Arrangement) -> Iterator[Arrangement]:
    """Yield the arrangement on 2 or more equal channels, which NCCL uses for larger calls."""
    # NCCL's kernels have one of these thread counts, which decides chunk sizes.
    for threads in (512, 256):
        for channels in range(2, CHANNELS_MAX + 1):
            yield replace(
                arrangement,
                rings=arrangement.rings * channels,
                trees=arrangement.trees * channels,
                threads=threads,
            )


def in_words(arrangement: Arrangement) -> str:
    """Describe an arrangement, for a note."""
    ring = " ".join(map(str, arrangement.rings[0]))
    parts = (
        [f"ring {ring}"] if "ring" in (arrangement.all_reduce, arrangement.reduce_scatter) else []
    )
    if arrangement.all_reduce == "tree":
        parts.append(f"tree {text_of(arrangement.trees[0])} in all-reduces")
    if arrangement.reduce_scatter == "pat":
        parts.append("PAT in reduce-scatters")
    count = len(arrangement.rings)
    return ", ".join(parts) + (f", on {count} channels" if count > 1 else "")


def _gives(
    arrangement: Arrangement, observed: ObservedOrder, *, kind: str, elems: int, elem_bytes: int
) -> bool:
    # A rank's part of a reduce-scatter ends on that rank. An all-reduce has no such end.
    ends = range(len(arrangement.rings[0])) if kind == "reduce_scatter" else (0,)
    for ends_on in ends:
        # Compare every element of the model's runs, because a shifted boundary is a contradiction.
        for start, stop, tree in pieces(
            arrangement, kind=kind, elems=elems, elem_bytes=elem_bytes, ends_on=ends_on
        ):
            wanted = text_of(tree)
            if any(observed.tree_of(element) != wanted for element in range(start, stop)):
                return False
    return True


def _candidates(
    scattered: ObservedOrder, reduced: ObservedOrder, *, rank_count: int
) -> Iterator[Arrangement]:
    rings = [*_rings_of(scattered, rank_count), *_rings_of(reduced, rank_count)]
    plain = in_order(rank_count)
    arrangements = [replace(plain, rings=(ring,)) for ring in dict.fromkeys(rings)] or [plain]
    # NCCL's tree algorithm uses one tree for all elements, so any other result is no such tree.
    trees = (tree_of(reduced.trees[0]),) if "?" not in reduced.trees else ()
    for arrangement in arrangements:
        yield arrangement
        # PAT (parallel aggregated trees) is NCCL's other algorithm for reduce-scatters.
        yield replace(arrangement, reduce_scatter="pat")
    if trees and len(reduced.trees) == 1:
        for arrangement in arrangements:
            treed = replace(arrangement, all_reduce="tree", trees=trees)
            yield treed
            yield replace(treed, reduce_scatter="pat")


def _rings_of(observed: ObservedOrder, rank_count: int) -> Iterator[tuple[int, ...]]:
    """Yield the rings that may have produced the observed chains.

    A chain's first two ranks have no observable order, because a + b is b + a.
    """
    for text in dict.fromkeys(observed.trees):
        chain = [] if text == "?" else _chain(tree_of(text))
        if len(chain) == rank_count:
            for ranks in (chain, [chain[1], chain[0], *chain[2:]]):
                # NCCL writes rings from rank 0.
                zero = ranks.index(0)
                yield (*ranks[zero:], *ranks[:zero])


def _chain(tree: Tree) -> list[int]:
    """Return the ranks of a tree that adds one rank after another; empty for other trees."""
    stack: list[list[int]] = []
    for step in tree:
        if step != ADD:
            stack.append([step])
            continue
        # In postfix order, an addition's operands are on top of the stack.
        right, left = stack.pop(), stack.pop()
        # Addition commutes, so the longer side is the chain so far.
        if len(left) < len(right):
            left, right = right, left
        if len(right) != 1:
            return []
        stack.append([*left, *right])
    return stack[0]
