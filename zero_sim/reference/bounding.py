"""Intervals for a sum that hold for every summation order, proven from its terms.

[Note: proven bounds]
Let n terms be added in any binary tree of n - 1 sums. Each sum is rounded to a dtype with unit
roundoff u, or kept in a finer dtype with unit roundoff v. The last sum is rounded to the dtype.

Rounding to the dtype changes a sum by a factor within 1 ± u, rounding to the finer dtype by a
factor within 1 ± v. A sum of two dtype numbers may be rounded to the finer dtype first. This is
harmless, because the finer dtype has more than twice the bits. Any other sum that is rounded twice
has an operand that was kept finer, and no two sums share an operand. So with F finer sums and B
sums rounded to the dtype, at most F are rounded twice. On its way to the root, no term is stretched
by more than (1 + u)^B (1 + v)^(2F). Because (1 + v)^2 < 1 + u and B + F = n - 1, every tree
satisfies

    |computed - exact| <= ((1 + u)^(n - 1) - 1) * sum of |terms|.

Addition within a dtype never underflows. Rounding a finer sum to it can, and loses less than the
smallest positive number e at each of the n - 1 sums. These losses are stretched like terms, which
adds (n - 1) (1 + u)^(n - 1) e. No partial sum exceeds (1 + u)^(n - 1) times the sum of |terms|. If
that leaves the dtype's range, some order may overflow, and the interval is open.

The bound itself is computed in fp64. The sum and the sum of magnitudes are each off by less than n
roundings, relative to the sum of magnitudes, and a few more roundings follow. So 4 n + 16 roundings
are added to the bound, and both ends move outwards by one fp64 number.

Underflow is assumed to be gradual; a backend that flushes subnormals to zero is not covered.
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
    """Closed interval of each element's possible values."""

    low: Tensor  # ND, fp64
    high: Tensor  # ND, fp64
    certified: Tensor  # ND, bool
    """True for elements with the same bits in every summation order; both ends are the sum."""
    nonfinite: Tensor  # ND, bool
    """True for elements that are finite in no order, because a term is not finite."""
    open: Tensor  # ND, bool
    """True for elements without a bound: `nonfinite`, or some order may overflow."""
    reach: float
    """Largest error in any order, relative to the sum of magnitudes."""

    @property
    def signed(self) -> Tensor:
        """True for elements that cannot be zero."""
        return (self.low > 0) | (self.high < 0)

    def cut(self, start: int, stop: int) -> Interval:
        """Return the interval for a range of flattened elements, as 1D views."""
        names = ("low", "high", "certified", "nonfinite", "open")
        return replace(
            self, **{name: getattr(self, name).reshape(-1)[start:stop] for name in names}
        )

    def divided_by(self, divisor: float) -> Interval:
        """Return the interval of the quotients, each rounded to fp32."""
        low, high = divide_ends(self.low, self.high, divisors=[divisor])
        return replace(self, low=low, high=high)

    def holds(self, got: Tensor) -> Tensor:
        """Return True for elements of `got` inside the interval; shapes are equal."""
        wide = got.to(torch.float64)
        return ((self.low <= wide) & (wide <= self.high)) | self.open


def bound_sum(terms: Sequence[Tensor]) -> Interval:
    """Bound a sum for every summation order; see [Note: proven bounds].

    Args:
        terms: At least one term; equal shapes and floating-point dtypes. Sums are rounded to this
            dtype or a finer dtype.
    """
    dtype, count = terms[0].dtype, len(terms)
    limits = torch.finfo(dtype)
    # The exact sum up to fp64 rounding, and the sum of magnitudes.
    total = terms[0].to(torch.float64, copy=True)
    magnitudes = total.abs()
    for term in terms[1:]:
        total += term
        magnitudes += term.abs()
    reach = reach_of(count, dtype=dtype)
    # Roundings of this computation itself; see the note.
    slack = (4 * count + 16) * _ROUNDING
    # tiny * eps is the dtype's smallest subnormal, e in the note.
    lost = (count - 1) * (1 + reach) * limits.tiny * limits.eps
    radius = (magnitudes * reach + lost) * (1 + slack) + magnitudes * slack
    certified = certify(terms)
    # An order may leave the dtype's range, unless every partial sum is exact.
    unbounded = magnitudes * ((1 + reach) * (1 + 2 * slack)) > limits.max
    nonfinite = ~total.isfinite()
    opened = nonfinite | (unbounded & ~certified)
    infinity = torch.full_like(total, math.inf)
    low, high = total - radius, total + radius
    # Outwards, because the two sums above round as well.
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
    """Return the interval for a sum with only one order."""
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
    # Fractions, so that only the final conversion rounds.
    unit = Fraction(torch.finfo(dtype).eps) / 2
    exact = (1 + unit) ** (count - 1) - 1
    # Beyond 2**1000 every bound is open, and fp64 could not represent this bound.
    return math.inf if exact > 2**1000 else math.nextafter(float(exact), math.inf)


def divide_ends(low: Tensor, high: Tensor, *, divisors: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Divide both fp64 ends by positive numbers in turn, rounding each quotient to fp32."""
    infinity = torch.full_like(low, math.inf)
    # Sums are converted to fp32 before their division.
    low, high = low.to(torch.float32).double(), high.to(torch.float32).double()
    # Rounding is monotonic, so quotients between the old ends lie between the new ends.
    for divisor in divisors:
        # Quotients in fp64 may be off by a rounding, so move outwards before rounding to fp32.
        low = torch.nextafter(quotient(low, divisor), -infinity).to(torch.float32).double()
        high = torch.nextafter(quotient(high, divisor), infinity).to(torch.float32).double()
    return low, high
