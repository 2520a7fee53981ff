"""Common factor from expected to observed elements, as a wrong or missing divisor causes it.

[Note: rounded ratios]
A bf16 value stands for every real number within half a bf16 unit, plus half an fp32 unit because
sums and divisions may run in fp32 first; other dtypes alike. A factor r explains a difference if
each element allows it: some number behind the expected value, times r, rounds to the observed
value. A factor is reported if it is a whole number n or 1/n, explains all elements, and its
neighbours n - 1 and n + 1 do not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_NUMBER_MAX = 2.0**53
"""Largest factor. Beyond it, fp64 skips whole numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """A common factor from expected to observed elements."""

    number: int
    """n, for a factor of n or 1/n. May be negative."""
    is_multiple: bool
    """True for n, False for 1/n."""
    is_rounded: bool
    """True if the factor holds only up to rounding."""

    def __str__(self) -> str:
        if self.is_multiple:
            return str(self.number)
        return f"{'-' if self.number < 0 else ''}1/{abs(self.number)}"


def ratio_in_words(ratio: Ratio | None) -> str:
    """Return a factor as a sentence; empty for None."""
    if ratio is None:
        return ""
    rounded = ", up to rounding" if ratio.is_rounded else ""
    return f"every element is {ratio} x the expected one{rounded}"


def find_ratio(expected: Tensor, got: Tensor) -> Ratio | None:
    """Find a factor n or 1/n, see [Note: rounded ratios]; None if it does not explain all elements.

    Args:
        expected: Any shape, floating-point.
        got: Same shape and dtype.
    """
    if not expected.is_floating_point() or not bool(expected.any()) or not bool(got.any()):
        return None
    wanted, came = expected.reshape(-1).double(), got.reshape(-1).double()
    if not bool((wanted.isfinite() & came.isfinite()).all()):
        return None
    # The largest value has the smallest relative rounding, so it gives the best estimate.
    largest = int(wanted.abs().argmax())
    top, bottom = float(came[largest]), float(wanted[largest])
    if top == 0:
        return None
    is_multiple = abs(top) >= abs(bottom)
    quotient = top / bottom if is_multiple else bottom / top
    # A factor of 1 explains nothing.
    if abs(quotient) > _NUMBER_MAX or round(quotient) == 1:
        return None
    number = round(quotient)

    def explains(count: int, *, slack: float) -> bool:
        if count == 0:
            return False
        # Multiply instead of dividing, so that no quotient is rounded.
        left, right = (came, wanted * count) if is_multiple else (came * count, wanted)
        room = slack * (
            _half_units(came, got.dtype) + _half_units(wanted, got.dtype) * abs(count)
            if is_multiple
            else _half_units(came, got.dtype) * abs(count) + _half_units(wanted, got.dtype)
        )
        return bool(((left - right).abs() <= room).all())

    # First exact, then up to rounding.
    if explains(number, slack=0):
        return Ratio(number=number, is_multiple=is_multiple, is_rounded=False)
    rivals = (number - 1, number + 1)
    if explains(number, slack=1) and not any(explains(each, slack=1) for each in rivals):
        return Ratio(number=number, is_multiple=is_multiple, is_rounded=True)
    return None


def _half_units(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return each value's largest rounding error."""
    total = torch.zeros_like(values)
    # A rounding to the dtype, and an earlier rounding to fp32.
    for each in (dtype, torch.float32):
        info = torch.finfo(each)
        # frexp returns a significand in [0.5, 1), so the unit is that of exponent - 1. Subnormals
        # share the unit of the smallest normal number.
        exponent = torch.frexp(values.abs().clamp_min(info.smallest_normal)).exponent - 1
        total += torch.exp2(exponent.double()) * (info.eps / 2)
    return total
