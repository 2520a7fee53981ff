"""Param sizes and shapes near the edges of a partition."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from zero_sim.fuzz.choices import Choices

PARAMS_MAX = 6

Shape = tuple[int, ...]

_KINDS = ("vector", "vector", "vector", "scalar", "scalar", "scalar", "wide", "tall", "deep")
_KINDS_WITHOUT_SCALARS = ("vector", "vector", "vector", "wide", "tall", "deep")


def divisors(size: int) -> list[int]:
    """Return all divisors of a positive number in ascending order."""
    return [count for count in range(1, size + 1) if size % count == 0]


def edge_size(choices: Choices, shard_count: int, *, align_elems: int = 1, least: int = 0) -> int:
    """Draw a number of elements, often where a partition may be off by one.

    Args:
        choices: Source of choices.
        shard_count: Number of shards N. 0, 1, N - 1, N and N + 1 are edges.
        align_elems: Alignment A of shards in elements. N * A - 1, N * A and N * A + 1 are edges.
        least: Minimum of the result.
    """
    unit = shard_count * align_elems
    if choices.among((False, True)):
        return choices.integer(least, 3 * unit)
    # 1 comes first, so that cases shrink to it.
    edges = {0, 1, shard_count - 1, shard_count, shard_count + 1, unit - 1, unit, unit + 1}
    return choices.among([1, *sorted(size for size in edges - {1} if size >= least)])


def param_shape(
    choices: Choices,
    shard_count: int,
    *,
    align_elems: int = 1,
    empty: bool = True,
    scalars: bool = True,
) -> Shape:
    """Draw a param's shape: scalar, vector, matrix, 3D or 4D tensor, maybe empty.

    Args:
        choices: Source of choices.
        shard_count: See `edge_size`.
        align_elems: See `edge_size`.
        empty: True to allow empty params.
        scalars: True to allow scalars.
    """
    least = 0 if empty else 1
    # Wide and tall matrices, because some partitions cut the flat param and others between rows.
    kind = choices.among(_KINDS if scalars else _KINDS_WITHOUT_SCALARS)
    if kind == "scalar":
        return ()
    size = edge_size(choices, shard_count, align_elems=align_elems, least=least)
    if kind == "vector":
        return (size,)
    few = choices.integer(least, 4)
    if kind == "deep":
        return (few, *(choices.among([(2,), (1, 2)])), size)
    return (few, size) if kind == "wide" else (size, few)


def param_shapes(
    choices: Choices,
    shard_count: int,
    *,
    align_elems: int = 1,
    params_max: int = PARAMS_MAX,
    empty: bool = True,
    scalars: bool = True,
) -> tuple[Shape, ...]:
    """Draw shapes of a model's params. At least one param is not empty.

    Args:
        choices: Source of choices.
        shard_count: See `edge_size`.
        align_elems: See `edge_size`.
        params_max: Maximum number of params.
        empty: See `param_shape`.
        scalars: See `param_shape`.
    """
    drawn = [
        param_shape(choices, shard_count, align_elems=align_elems, empty=empty, scalars=scalars)
        for _ in range(choices.integer(1, params_max))
    ]
    # A model without elements has no gradient to compare.
    if not any(map(math.prod, drawn)):
        drawn[-1] = (1,)
    return tuple(drawn)


def bucket_size(choices: Choices, sizes: Sequence[int]) -> int:
    """Draw a bucket size, often an exact fit.

    An exact fit is a param's size, or the sum of the first or last few sizes, give or take one
    element.

    Args:
        choices: Source of choices.
        sizes: Elements of each param, in registration order.
    """
    # Otherwise small, so that there are several buckets.
    if choices.among((False, True)):
        return choices.integer(1, max(8, *sizes))
    sums = {*sizes, *accumulate(sizes), *accumulate(reversed(sizes))} - {0}
    return choices.among(sorted({max(1, total + by) for total in sums for by in (-1, 0, 1)} | {1}))
