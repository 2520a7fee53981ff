"""The one factor by which everything is off, as by a wrong or missing divisor, if there is one.

[Note: rounded ratios]
A number of a dtype stands for all real numbers that round to it: those within half a unit in its
last place, and half a unit of fp32 more where it was added or divided in fp32 first. A factor r
explains what came if for every element some real number that the expected value stands for, times
r, is one that the value which came stands for. It is named if it is a whole number or the inverse
of one, and neither the next smaller nor the next larger one explains all elements as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_NUMBER_MAX = 2.0**53
"""Among larger ones fp64 does not have every whole number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """One factor between all expected elements and those that came."""

    number: int
    """The factor or, if it is a fraction, its inverse."""
    is_multiple: bool
    is_rounded: bool
    """True if it holds for the real numbers that the elements stand for, not for these alone."""

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
    """Find the factor, a whole number or the inverse of one; see [Note: rounded ratios].

    Args:
        expected: Any shape, floating-point.
        got: Of the same shape and dtype.
    """
    if not expected.is_floating_point() or not bool(expected.any()) or not bool(got.any()):
        return None
    wanted, came = expected.reshape(-1).double(), got.reshape(-1).double()
    if not bool((wanted.isfinite() & came.isfinite()).all()):
        return None
    # Where the expected value is largest, its roundings leave the least room.
    largest = int(wanted.abs().argmax())
    top, bottom = float(came[largest]), float(wanted[largest])
    if top == 0:
        return None
    is_multiple = abs(top) >= abs(bottom)
    quotient = top / bottom if is_multiple else bottom / top
    if abs(quotient) > _NUMBER_MAX or round(quotient) == 1:
        return None
    number = round(quotient)

    def explains(count: int, *, slack: float) -> bool:
        if count == 0:
            return False
        # Multiplied out, so that no quotient is rounded.
        left, right = (came, wanted * count) if is_multiple else (came * count, wanted)
        room = slack * (
            _half_units(came, got.dtype) + _half_units(wanted, got.dtype) * abs(count)
            if is_multiple
            else _half_units(came, got.dtype) * abs(count) + _half_units(wanted, got.dtype)
        )
        return bool(((left - right).abs() <= room).all())

    if explains(number, slack=0):
        return Ratio(number=number, is_multiple=is_multiple, is_rounded=False)
    rivals = (number - 1, number + 1)
    if explains(number, slack=1) and not any(explains(each, slack=1) for each in rivals):
        return Ratio(number=number, is_multiple=is_multiple, is_rounded=True)
    return None


def _half_units(values: Tensor, dtype: torch.dtype) -> Tensor:
    """How far from each value the real numbers may lie that it stands for, at most."""
    total = torch.zeros_like(values)
    for each in (dtype, torch.float32):
        info = torch.finfo(each)
        exponent = torch.frexp(values.abs().clamp_min(info.smallest_normal)).exponent - 1
        total += torch.exp2(exponent.double()) * (info.eps / 2)
    return total
