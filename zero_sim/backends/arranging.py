"""The arrangement of a communicator, recovered from what a probe observed of it.

Nothing is taken from a model that was not seen: a ring's ranks come from its reduce-scatters, a
tree from its all-reduces, and whatever is put together has to give every tree that was observed.
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
"""Of the calls that are observed: each chunk of an all-reduce is one that can be told apart."""
CHANNELS_MAX = 64


def arrangement_of(group: dist.ProcessGroup, *, device: str) -> tuple[Arrangement | None, str]:
    """How a communicator adds; to be called by all its ranks.

    Args:
        group: The communicator.
        device: Where data lies.

    Returns:
        Its arrangement, or None where it fits no model; and what was observed, in words.
    """
    size, dtype = group.size(), torch.float32
    elems = ELEMS_A_RANK * size
    scattered, reduced = (
        observe(
            by_calling(kind, group=group, elems=elems, device=device),
            rank_count=size,
            elems=elems,
            dtype=dtype,
        )
        for kind in ("reduce_scatter", "all_reduce")
    )
    told = (
        f"reduce-scatter {_told(scattered)}, all-reduce {_told(reduced)}, partial sums "
        f"{scattered.accumulator} and {reduced.accumulator}"
    )
    return fit(scattered, reduced, rank_count=size, elems=elems, elem_bytes=4), told


def _told(observed: ObservedOrder) -> str:
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
    """The arrangement on one channel that gives all that was observed; None where none does.

    Args:
        scattered: Of a reduce-scatter.
        reduced: Of an all-reduce.
        rank_count: Ranks of the communicator.
        elems: Of both calls.
        elem_bytes: Size of an element.
    """
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
    """The same on several channels, as NCCL would use them for larger calls; its rings alike."""
    for threads in (512, 256):
        for channels in range(2, CHANNELS_MAX + 1):
            yield replace(
                arrangement,
                rings=arrangement.rings * channels,
                trees=arrangement.trees * channels,
                threads=threads,
            )


def in_words(arrangement: Arrangement) -> str:
    """An arrangement, for a note."""
    ring = " ".join(map(str, arrangement.rings[0]))
    said = (
        [f"ring {ring}"] if "ring" in (arrangement.all_reduce, arrangement.reduce_scatter) else []
    )
    if arrangement.all_reduce == "tree":
        said.append(f"tree {text_of(arrangement.trees[0])} in all-reduces")
    if arrangement.reduce_scatter == "pat":
        said.append("PAT in reduce-scatters")
    count = len(arrangement.rings)
    return ", ".join(said) + (f", on {count} channels" if count > 1 else "")


def _gives(
    arrangement: Arrangement, observed: ObservedOrder, *, kind: str, elems: int, elem_bytes: int
) -> bool:
    ends = range(len(arrangement.rings[0])) if kind == "reduce_scatter" else (0,)
    for ends_on in ends:
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
    trees = (tree_of(reduced.trees[0]),) if "?" not in reduced.trees else ()
    for arrangement in arrangements:
        yield arrangement
        yield replace(arrangement, reduce_scatter="pat")
    if trees and len(reduced.trees) == 1:
        for arrangement in arrangements:
            treed = replace(arrangement, all_reduce="tree", trees=trees)
            yield treed
            yield replace(treed, reduce_scatter="pat")


def _rings_of(observed: ObservedOrder, rank_count: int) -> Iterator[tuple[int, ...]]:
    """Rings that may have given the chains of an observation.

    Which of the first two ranks of a chain comes first cannot be seen.
    """
    for text in dict.fromkeys(observed.trees):
        chain = [] if text == "?" else _chain(tree_of(text))
        if len(chain) == rank_count:
            for ranks in (chain, [chain[1], chain[0], *chain[2:]]):
                zero = ranks.index(0)
                yield (*ranks[zero:], *ranks[:zero])


def _chain(tree: Tree) -> list[int]:
    """The ranks of a tree that adds one after another; empty where it is another tree."""
    stack: list[list[int]] = []
    for step in tree:
        if step != ADD:
            stack.append([step])
            continue
        right, left = stack.pop(), stack.pop()
        if len(left) < len(right):
            left, right = right, left
        if len(right) != 1:
            return []
        stack.append([*left, *right])
    return stack[0]
