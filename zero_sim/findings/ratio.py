"""The common factor of all elements, as caused by a wrong or missing divisor.

[Note: rounded ratios]
A number of a dtype represents all real numbers that round to it: those within half a unit in its
last place, plus half a unit of fp32 if it was added or divided in fp32 first. A factor r explains a
difference if, for every element, r times some real number represented by the expected value is
represented by the observed one. It is reported if it is a whole number or the inverse of one, and
neither of its neighbours explains all elements too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_NUMBER_MAX = 2.0**53
"""Limit of factors: beyond it, fp64 skips whole numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """A common factor from expected to observed elements."""

    number: int
    """The factor or, for a fraction, its inverse."""
    is_multiple: bool
    is_rounded: bool
    """True if the factor holds up to rounding only, not for the values themselves."""

    def __str__(self) -> str:
        if self.is_multiple:
            return str(self.number)
        return f"{'-' if self.number < 0 else ''}1/{abs(self.number)}"


def ratio_in_words(ratio: Ratio | None) -> str:
    """Return a sentence about a factor; empty for None."""
    if ratio is None:
        return ""
    rounded = ", but for rounding" if ratio.is_rounded else ""
    return f"every element is {ratio} x the expected one{rounded}"


def find_ratio(expected: Tensor, got: Tensor) -> Ratio | None:
    """Find a factor that is a whole number or the inverse of one; see [Note: rounded ratios].

    Args:
        expected: Any shape, floating-point.
        got: Same shape and dtype.
    """
    if not expected.is_floating_point() or not bool(expected.any()) or not bool(got.any()):
        return None
    wanted, came = expected.reshape(-1).double(), got.reshape(-1).double()
    if not bool((wanted.isfinite() & came.isfinite()).all()):
        return None
    # Relative rounding is smallest at the largest value, so it gives the best estimate.
    largest = int(wanted.abs().argmax())
    top, bottom = float(came[largest]), float(wanted[largest])
    if top == 0:
        return None
    is_multiple = abs(top) >= abs(bottom)
    # A factor of 1 explains nothing.
    quotient = top / bottom if is_multiple else bottom / top
    if abs(quotient) > _NUMBER_MAX or round(quotient) == 1:
        return None
    number = round(quotient)

    def explains(count: int, *, slack: float) -> bool:
        if count == 0:
            return False
        # Multiply instead of divide, so that no quotient is rounded.
        left, right = (came, wanted * count) if is_multiple else (came * count, wanted)
        room = slack * (
            _half_units(came, got.dtype) + _half_units(wanted, got.dtype) * abs(count)
            if is_multiple
            else _half_units(came, got.dtype) * abs(count) + _half_units(wanted, got.dtype)
        )
        return bool(((left - right).abs() <= room).all())

    if explains(number, slack=0):
        # Exact first; then up to rounding, if no neighbouring factor fits as well.
        return Ratio(number=number, is_multiple=is_multiple, is_rounded=False)
    rivals = (number - 1, number + 1)
    if explains(number, slack=1) and not any(explains(each, slack=1) for each in rivals):
        return Ratio(number=number, is_multiple=is_multiple, is_rounded=True)
    return None


def _half_units(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the largest distance from each value to the real numbers that it represents."""
    total = torch.zeros_like(values)
    # Rounding to the dtype, and an earlier one in fp32.
    for each in (dtype, torch.float32):
        info = torch.finfo(each)
        # frexp returns a significand in [0.5, 1), so the unit is that of exponent - 1. Subnormals
        # share the unit of the smallest normal number.
        exponent = torch.frexp(values.abs().clamp_min(info.smallest_normal)).exponent - 1
        total += torch.exp2(exponent.double()) * (info.eps / 2)
    return total
