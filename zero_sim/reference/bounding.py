"""Between which numbers a sum must lie, whatever the order of addition: proven from the data.

[Note: proven bounds]
Let n terms be added by any binary tree, each of whose n - 1 sums is rounded to a dtype of unit
roundoff u, or is kept in one that is finer, and the last of which is rounded to that dtype.

A rounding to the dtype is off by a factor within 1 ± u, one to a finer dtype within 1 ± v. A sum of
two numbers of the dtype may be rounded to a finer one first: that has more than twice the bits, and
so does no harm. Any other sum that is rounded twice has a sum right below it that was kept finer,
and no two have the same. So of F sums that are kept finer and B that are rounded to the dtype, at
most F are rounded twice, and on its way to the root no term is stretched by more than
(1 + u)^B (1 + v)^(2F). As (1 + v)^2 < 1 + u and B + F = n - 1, in every tree

    |computed - exact| <= ((1 + u)^(n - 1) - 1) * sum of |terms|.

Adding in a dtype never underflows; rounding a finer sum to it can, by less than its smallest
number, e, at each of the n - 1 sums. What is lost there is stretched on the way to the root like a
term, so (n - 1) (1 + u)^(n - 1) e is added. No partial sum is larger than (1 + u)^(n - 1) times the
sum of |terms|; where that leaves the dtype's range, some order may overflow and nothing is owed.

The bound itself is computed in fp64. The sum and the sum of magnitudes are off by less than n
roundings each, relative to the sum of magnitudes, and a handful follow; four times n, and sixteen,
are added to the bound, and its ends are moved one fp64 number outwards.

Numbers are supposed to underflow gradually: a backend that flushes them to zero is not covered.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from torch import Tensor

from zero_sim.reference.certificate import certify
from zero_sim.reference.division import quotient

_ROUNDING = 2.0**-53  # of fp64


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """Between which numbers each element must lie, ends included."""

    low: Tensor  # ND, fp64
    high: Tensor  # ND, fp64
    certified: Tensor  # ND, bool
    """Where every order of addition gives the same bits, so that both ends are the sum."""
    nonfinite: Tensor  # ND, bool
    """Where no order gives a finite sum, since a term is not finite."""
    open: Tensor  # ND, bool
    """Where nothing is owed: there, and where some order may overflow."""
    reach: float
    """How far from the exact sum an order can end, as a part of the sum of magnitudes."""

    @property
    def signed(self) -> Tensor:
        """Which elements cannot be zero."""
        return (self.low > 0) | (self.high < 0)

    def cut(self, start: int, stop: int) -> Interval:
        """Return that of some of the flattened elements, 1D; views."""
        names = ("low", "high", "certified", "nonfinite", "open")
        return replace(
            self, **{name: getattr(self, name).reshape(-1)[start:stop] for name in names}
        )

    def divided_by(self, divisor: float) -> Interval:
        """Return that of the quotients, each rounded to fp32."""
        low, high = divide_ends(self.low, self.high, divisors=[divisor])
        return replace(self, low=low, high=high)

    def holds(self, got: Tensor) -> Tensor:
        """Which elements of a tensor of the same shape lie within."""
        wide = got.to(torch.float64)
        return ((self.low <= wide) & (wide <= self.high)) | self.open


def bound_sum(terms: Sequence[Tensor]) -> Interval:
    """Bound a sum for every order of addition; see [Note: proven bounds].

    Args:
        terms: All that is added, one or more, of one shape and floating-point dtype: the one in
            which, or in a finer one, sums are rounded.
    """
    dtype, count = terms[0].dtype, len(terms)
    limits = torch.finfo(dtype)
    total = terms[0].to(torch.float64, copy=True)
    magnitudes = total.abs()
    for term in terms[1:]:
        total += term
        magnitudes += term.abs()
    reach = reach_of(count, dtype=dtype)
    slack = (4 * count + 16) * _ROUNDING
    lost = (count - 1) * (1 + reach) * limits.tiny * limits.eps
    radius = (magnitudes * reach + lost) * (1 + slack) + magnitudes * slack
    certified = certify(terms)
    unbounded = magnitudes * ((1 + reach) * (1 + 2 * slack)) > limits.max
    nonfinite = ~total.isfinite()
    opened = nonfinite | (unbounded & ~certified)
    infinity = torch.full_like(total, math.inf)
    low, high = total - radius, total + radius
    low, high = torch.nextafter(low, -infinity), torch.nextafter(high, infinity)
    return Interval(
        low=torch.where(certified, total, low).masked_fill_(opened, -math.inf),
        high=torch.where(certified, total, high).masked_fill_(opened, math.inf),
        certified=certified,
        nonfinite=nonfinite,
        open=opened,
        reach=reach,
    )


def known_sum(total: Tensor, terms: Sequence[Tensor]) -> Interval:
    """Return the interval of a sum that has one order only.

    Args:
        total: The sum.
        terms: What was added, as for `bound_sum`.
    """
    wide = total.to(torch.float64)
    nonfinite = ~wide.isfinite()
    return Interval(
        low=wide.masked_fill(nonfinite, -math.inf),
        high=wide.masked_fill(nonfinite, math.inf),
        certified=certify(terms),
        nonfinite=nonfinite,
        open=nonfinite,
        reach=0.0,
    )


@functools.lru_cache(maxsize=1024)
def reach_of(count: int, *, dtype: torch.dtype) -> float:
    """Return (1 + u)^(count - 1) - 1, rounded up; u is the unit roundoff of the dtype."""
    if count < 2:
        return 0.0
    unit = Fraction(torch.finfo(dtype).eps) / 2
    exact = (1 + unit) ** (count - 1) - 1
    # Beyond this every bound is open; a number that fp64 cannot hold is no help.
    return math.inf if exact > 2**1000 else math.nextafter(float(exact), math.inf)


def divide_ends(low: Tensor, high: Tensor, *, divisors: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Divide both ends by positive numbers, one after the other, each quotient rounded to fp32.

    Rounding never changes which of two numbers is larger; so what lies between the ends, divided
    in fp32, lies between the new ones.

    Args:
        low: fp64.
        high: fp64, of the same shape.
        divisors: What fp32 divides by.
    """
    infinity = torch.full_like(low, math.inf)
    low, high = low.to(torch.float32).double(), high.to(torch.float32).double()
    for divisor in divisors:
        low = torch.nextafter(quotient(low, divisor), -infinity).to(torch.float32).double()
        high = torch.nextafter(quotient(high, divisor), infinity).to(torch.float32).double()
    return low, high
