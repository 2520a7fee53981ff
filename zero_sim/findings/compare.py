"""Comparison of two tensors: whether they hold the same bits, and where they first do not.

[Note: the rule for equality]
Two elements are equal if their bits are, with two exceptions: +0 and -0 are equal, since whether an
accumulator starts from zero or from its first term decides the sign of a zero and nothing else; and
all NaNs are equal, since their payloads carry no meaning. There is no tolerance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SPANS_MAX = 64
"""Spans kept of what differs: enough to draw it."""

_INT_OF = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Where and how two tensors of one shape and dtype differ."""

    first: int
    """Flat index of the first element that differs."""
    expected: float
    got: float
    ulp: int | None
    """Values of the dtype from one to the other; None where one is NaN, and for integers."""
    differ_count: int
    compared_count: int
    spans: tuple[tuple[int, int], ...]
    """Half-open spans of elements that differ, at most `SPANS_MAX` of them."""


def same_bits(expected: Tensor, got: Tensor) -> bool:
    """Whether two tensors of one shape and dtype are equal under [Note: the rule for equality]."""
    # torch.equal is that rule but for NaN, and a hundred times faster than looking at bits.
    return torch.equal(expected, got) or not bool(unequal(expected, got).any())


def find_difference(expected: Tensor, got: Tensor) -> Difference | None:
    """Compare two tensors of one shape and dtype.

    Returns:
        None where they are equal under [Note: the rule for equality].
    """
    if torch.equal(expected, got):
        return None
    differs = unequal(expected, got).reshape(-1)
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
    """Return the largest difference, as a part of the largest magnitude on either side.

    Args:
        expected: Any shape and dtype.
        got: Of the same number of elements.

    Returns:
        At most 2; infinity if there is a NaN or an infinity.
    """
    a, b = expected.reshape(-1).double(), got.reshape(-1).double()
    most = torch.cat([a, b]).abs().max() if a.numel() else a.sum()
    if not bool(most.isfinite()):
        return math.inf
    return float((a - b).abs().max() / most) if most else 0.0


def spans_of(differs: Tensor) -> tuple[tuple[int, int], ...]:
    """Half-open spans of the elements of a 1-D mask that are set, the first `SPANS_MAX` of them."""
    edges = torch.zeros(differs.numel() + 2, dtype=torch.int8)
    edges[1:-1] = differs
    bounds = (edges[1:] != edges[:-1]).nonzero().reshape(-1)[: 2 * SPANS_MAX].tolist()
    return tuple(zip(bounds[::2], bounds[1::2], strict=True))


def unequal(expected: Tensor, got: Tensor) -> Tensor:
    """Which elements of two tensors of one shape and dtype are not equal, as a mask."""
    if not expected.is_floating_point():
        return expected != got
    both_nan = expected.isnan() & got.isnan()
    return (_bits(expected) != _bits(got)) & ~both_nan


def _bits(tensor: Tensor) -> Tensor:
    plus_zero = torch.where(tensor == 0, torch.zeros_like(tensor), tensor)
    return plus_zero.contiguous().view(_INT_OF[tensor.element_size()])


def _ulp(a: Tensor, b: Tensor) -> int | None:
    if not a.is_floating_point() or bool(a.isnan()) or bool(b.isnan()):
        return None
    return abs(int(places_of(a)) - int(places_of(b)))


def places_of(values: Tensor) -> Tensor:
    """Each value's place in the ordered line of all values of its dtype, zero at 0; int64."""
    bits = _bits(values).to(torch.int64)
    magnitude_mask = (1 << (8 * values.element_size() - 1)) - 1
    return torch.where(bits < 0, -(bits & magnitude_mask), bits)
