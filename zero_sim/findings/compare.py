"""Exact comparison of two tensors.

[Note: the rule for equality]
Elements are equal if their bits are equal, with two exceptions. There is no tolerance.

- +0 equals -0, because the sign only depends on the accumulator's start: zero or the first term.
- NaN equals NaN, because payloads have no meaning.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SPANS_MAX = 64
"""Number of differing spans to keep: enough to draw them."""

_INT_OF = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """First differing element of two tensors, and the size of their difference."""

    first: int
    """Flat index of this element."""
    expected: float
    got: float
    ulp: int | None
    """Distance in representable values; None for NaN and integers."""
    differ_count: int
    compared_count: int
    spans: tuple[tuple[int, int], ...]
    """Half-open spans of differing elements, at most the first `SPANS_MAX`."""


def same_bits(expected: Tensor, got: Tensor) -> bool:
    """Return True if two tensors are equal by [Note: the rule for equality].

    Args:
        expected: Any shape and dtype.
        got: Same shape and dtype.
    """
    # torch.equal implements this rule except for NaN, and is a hundred times faster than bits.
    return torch.equal(expected, got) or not bool(unequal(expected, got).any())


def find_difference(expected: Tensor, got: Tensor) -> Difference | None:
    """Return the difference of two tensors, or None if they are equal.

    Args:
        expected: Any shape and dtype.
        got: Same shape and dtype.
    """
    if torch.equal(expected, got):
        return None
    differs = unequal(expected, got).reshape(-1)
    # torch.equal is False for equal NaNs, so there may still be no difference.
    differ_count = int(differs.sum())
    if differ_count == 0:
        return None
    first = int(differs.nonzero()[0])
    a, b = expected.reshape(-1)[first], got.reshape(-1)[first]
    return Difference(
        first=first,
        expected=a.item(),
        got=b.item(),
        ulp=_ulp(a, b),
        differ_count=differ_count,
        compared_count=differs.numel(),
        spans=spans_of(differs),
    )


def relative_difference(expected: Tensor, got: Tensor) -> float:
    """Return the largest difference, relative to the largest magnitude in either tensor.

    Args:
        expected: Any shape and dtype.
        got: Same number of elements.

    Returns:
        At most 2, or infinity if any element is NaN or infinite.
    """
    a, b = expected.reshape(-1).double(), got.reshape(-1).double()
    most = torch.cat([a, b]).abs().max() if a.numel() else a.sum()
    if not bool(most.isfinite()):
        return math.inf
    # Two zero tensors do not differ; avoid 0/0.
    return float((a - b).abs().max() / most) if most else 0.0


def spans_of(differs: Tensor) -> tuple[tuple[int, int], ...]:
    """Return half-open spans of True in a 1-D mask, at most the first `SPANS_MAX`."""
    # [numel + 2], zero at both ends, so spans at the ends have edges too.
    edges = torch.zeros(differs.numel() + 2, dtype=torch.int8)
    edges[1:-1] = differs
    bounds = (edges[1:] != edges[:-1]).nonzero().reshape(-1)[: 2 * SPANS_MAX].tolist()
    # Edges alternate between start and stop.
    return tuple(zip(bounds[::2], bounds[1::2], strict=True))


def unequal(expected: Tensor, got: Tensor) -> Tensor:
    """Return a mask of unequal elements; both tensors have one shape and dtype."""
    if not expected.is_floating_point():
        return expected != got
    both_nan = expected.isnan() & got.isnan()
    return (_bits(expected) != _bits(got)) & ~both_nan


def _bits(tensor: Tensor) -> Tensor:
    # Replace -0 by +0, because they count as equal.
    plus_zero = torch.where(tensor == 0, torch.zeros_like(tensor), tensor)
    return plus_zero.contiguous().view(_INT_OF[tensor.element_size()])


def _ulp(a: Tensor, b: Tensor) -> int | None:
    if not a.is_floating_point() or bool(a.isnan()) or bool(b.isnan()):
        return None
    return abs(int(places_of(a)) - int(places_of(b)))


def places_of(values: Tensor) -> Tensor:
    """Number each value in the ascending order of its dtype, from 0 at zero, as int64.

    The difference of two numbers is their distance in ulp.
    """
    # IEEE 754 bits are sign and magnitude, so negative values count down from 0.
    bits = _bits(values).to(torch.int64)
    magnitude_mask = (1 << (8 * values.element_size() - 1)) - 1
    return torch.where(bits < 0, -(bits & magnitude_mask), bits)
