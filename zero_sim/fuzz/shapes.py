"""Sizes and shapes of params that lean towards the edges of a partition."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from hypothesis import strategies as st

PARAMS_MAX = 6

Shape = tuple[int, ...]


def divisors(size: int) -> list[int]:
    """All divisors of a positive size, ascending."""
    return [count for count in range(1, size + 1) if size % count == 0]


def edge_sizes(shard_count: int, *, align_elems: int = 1, least: int = 0) -> st.SearchStrategy[int]:
    """Numbers of elements at which a partition can be off by one.

    Args:
        shard_count: Number of shards N: 0, 1, N - 1, N and N + 1 are edges.
        align_elems: What shards are aligned to, in elements: its N-fold, and one less and more, are
            edges, too.
        least: Least number.
    """
    unit = shard_count * align_elems
    edges = {0, 1, shard_count - 1, shard_count, shard_count + 1, unit - 1, unit, unit + 1}
    others = sorted(size for size in edges - {1} if size >= least)
    return st.sampled_from([1, *others]) | st.integers(least, 3 * unit)


def shapes(
    shard_count: int, *, align_elems: int = 1, empty: bool = True, scalars: bool = True
) -> st.SearchStrategy[Shape]:
    """The shape of one param: scalars, vectors of edge sizes, small matrices, empty ones.

    Args:
        shard_count: As for `edge_sizes`.
        align_elems: As for `edge_sizes`.
        empty: Whether there are empty ones.
        scalars: Whether there are scalars.
    """
    least = 0 if empty else 1
    sizes = edge_sizes(shard_count, align_elems=align_elems, least=least)
    few = st.integers(least, 4)
    # Matrices both ways: some cut the flat param, and some cut between its rows.
    one = sizes.map(lambda size: (size,))
    both = st.tuples(few, sizes) | st.tuples(sizes, few)
    return st.one_of(one, st.just(()), both) if scalars else st.one_of(one, both)


@st.composite
def shape_lists(
    draw: st.DrawFn,
    shard_count: int,
    *,
    align_elems: int = 1,
    params_max: int = PARAMS_MAX,
    empty: bool = True,
    scalars: bool = True,
) -> tuple[Shape, ...]:
    """The shapes of a model's params, of which at least one is not empty.

    Args:
        draw: Given by Hypothesis.
        shard_count: As for `edge_sizes`.
        align_elems: As for `edge_sizes`.
        params_max: Most params.
        empty: As for `shapes`.
        scalars: As for `shapes`.
    """
    one = shapes(shard_count, align_elems=align_elems, empty=empty, scalars=scalars)
    drawn = draw(st.lists(one, min_size=1, max_size=params_max))
    if not any(map(math.prod, drawn)):
        drawn[-1] = (1,)
    return tuple(drawn)


def bucket_sizes(sizes: Sequence[int]) -> st.SearchStrategy[int]:
    """Bucket sizes for params of the given sizes, often exact fits.

    A fit is one of them, or a sum of the first, or the last, few, or an element less or more. Other
    sizes are small, so that there are several buckets.

    Args:
        sizes: Elements of each param, in registration order.
    """
    sums = {*sizes, *accumulate(sizes), *accumulate(reversed(sizes))} - {0}
    fits = sorted({max(1, total + by) for total in sums for by in (-1, 0, 1)} | {1})
    return st.sampled_from(fits) | st.integers(1, max(8, *sizes))
