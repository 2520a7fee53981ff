"""Certificate for a sum: the elements with the same bits in every summation order.

[Note: certified sums]
Let all terms of an element be multiples of one unit, a power of two. Let P be the sum of its
positive terms, and -M the sum of its negative terms. Every partial sum is a multiple of the unit
between -M and P. Let p be the number of significand bits in the dtype. If P and M are at most 2^p
units, the dtype represents all these multiples. Then no addition ever rounds: not in another order,
not in a wider accumulator, and not if terms are first added in parts. The bound is tight: 2^p, 1
and 1 have different sums in different orders.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Fraction bits and exponent bias in fp64.
_FRACTION_BITS, _BIAS = 52, 1023
_NO_UNIT = 1 << 20  # unit exponent for zero, which is a multiple of any unit


def certify(terms: Sequence[Tensor]) -> Tensor:
    """Return the elements whose sum has the same bits in all orders; see [Note: certified sums].

    Args:
        terms: All terms that are ever added, at least one, with equal shapes and floating-point
            dtypes. Sums are rounded to this dtype or a wider dtype.

    Returns:
        Bool, in a term's shape. False if a term is infinite or NaN.
    """
    limits = torch.finfo(terms[0].dtype)
    # Significand bits, including the implicit bit.
    bits = round(-math.log2(limits.eps)) + 1
    # [terms, *shape], fp64: exact for every narrower dtype
    stacked = torch.stack([term.to(torch.float64) for term in terms])
    unit = unit_exponents(stacked).amin(dim=0)
    positive, negative = stacked.clamp(min=0).sum(dim=0), -stacked.clamp(max=0).sum(dim=0)
    reach = torch.maximum(positive, negative)
    # If this fp64 sum itself rounds, it is already far beyond the bound.
    # 2^-unit, built from its bits: pow() may round.
    inverse_unit = (_BIAS - torch.where(unit == _NO_UNIT, 0, unit)) << _FRACTION_BITS
    units = reach * inverse_unit.view(torch.float64)
    # A partial sum beyond the dtype's range would overflow in some orders.
    return stacked.isfinite().all(dim=0) & (units <= 2.0**bits) & (reach <= limits.max)


def unit_exponents(values: Tensor) -> Tensor:
    """Return, for each fp64 value, the exponent of the largest power of two that divides it.

    Subnormal fp64 values are not supported, because narrower dtypes do not produce them.

    Returns:
        int64, in the shape of `values`; a huge number for zeros.
    """
    bits = values.contiguous().view(torch.int64)
    # value = significand x 2^(exponent - bias - 52)
    exponent = (bits >> _FRACTION_BITS) & 0x7FF
    significand = (bits & ((1 << _FRACTION_BITS) - 1)) | (1 << _FRACTION_BITS)
    lowest_bit = significand & -significand
    # The lowest set bit is a power of two, so frexp() finds its index exactly.
    trailing_zeros = torch.frexp(lowest_bit.to(torch.float64)).exponent - 1
    found = exponent - _BIAS - _FRACTION_BITS + trailing_zeros
    return torch.where(values == 0, _NO_UNIT, found)
