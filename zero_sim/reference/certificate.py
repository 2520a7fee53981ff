"""The certificate of a sum: which elements come out the same in every order of addition.

[Note: certified sums]
Let all terms of one element be whole numbers of one unit, a power of two; let P be the sum of the
positive ones and M that of the negative ones, without their sign. Every partial sum of any of the
terms is a whole number of units between -M and P. If both are at most 2^p, where p is the number of
bits of the dtype's significand, all of those are representable, so no addition ever rounds: neither
in another order, nor in a wider accumulator, nor where the terms are added in parts first. The
bound is tight: 2^p, 1 and 1 give two sums in two orders.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_FRACTION_BITS, _BIAS = 52, 1023  # of fp64
_NO_UNIT = 1 << 20  # exponent of the unit of a zero: it is a whole number of any unit


def certify(terms: Sequence[Tensor]) -> Tensor:
    """Return which elements' sum no order of addition can change; see [Note: certified sums].

    Args:
        terms: All that is ever added, of one shape and floating-point dtype: the one in which, or
            in a wider one, sums are rounded. One or more.

    Returns:
        Bool, of that shape. False where a term is infinite or NaN.
    """
    limits = torch.finfo(terms[0].dtype)
    bits = round(-math.log2(limits.eps)) + 1
    stacked = torch.stack([term.to(torch.float64) for term in terms])
    unit = unit_exponents(stacked).amin(dim=0)
    positive, negative = stacked.clamp(min=0).sum(dim=0), -stacked.clamp(max=0).sum(dim=0)
    reach = torch.maximum(positive, negative)
    # Should this fp64 sum itself be rounded, it is far beyond the bound, on either side of it.
    inverse_unit = (_BIAS - torch.where(unit == _NO_UNIT, 0, unit)) << _FRACTION_BITS
    units = reach * inverse_unit.view(torch.float64)
    return stacked.isfinite().all(dim=0) & (units <= 2.0**bits) & (reach <= limits.max)


def unit_exponents(values: Tensor) -> Tensor:
    """Return the exponent of the largest power of two that each fp64 value is a multiple of.

    Subnormal fp64 values do not come from narrower dtypes and are not handled.

    Returns:
        int64, of the values' shape; a huge number for a zero.
    """
    bits = values.contiguous().view(torch.int64)
    exponent = (bits >> _FRACTION_BITS) & 0x7FF
    significand = (bits & ((1 << _FRACTION_BITS) - 1)) | (1 << _FRACTION_BITS)
    lowest_bit = significand & -significand
    trailing_zeros = torch.frexp(lowest_bit.to(torch.float64)).exponent - 1
    found = exponent - _BIAS - _FRACTION_BITS + trailing_zeros
    return torch.where(values == 0, _NO_UNIT, found)
