"""Guarantees: why each reduced gradient element must match. There is no tolerance.

- `order-free`: the oracle certified that every order of addition gives these bits, so every backend
  must produce them.
- `one-sum`: each sum adds two numbers. IEEE addition commutes, so only one order exists.
- `modelled-order`: the bits follow from the world's declared order.
- `bound`: the order is unknown. The element must lie in an interval proven from the data
  (`zero_sim.reference.bounding`).

Masters, state and params are computed elementwise from the sum, so they have the same guarantee.
With `bound`, they must follow exactly from the reported sum.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from zero_sim.reference import BoundedStep, ReferenceStep

Guarantee = Literal["order-free", "one-sum", "modelled-order", "bound"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Width:
    """Width of a case's bounds."""

    reach: float = 0.0
    """Largest distance from the exact sum that an order can reach, relative to the sum of
    magnitudes."""
    signless: int = 0
    """Number of elements whose interval contains zero, so not even their sign is known."""

    def __add__(self, other: Width) -> Width:
        """Return the width of both together."""
        return Width(reach=max(self.reach, other.reach), signless=self.signless + other.signless)


def count_guarantees(
    step: ReferenceStep | BoundedStep,
    *,
    rank_count: int,
    replica_count: int,
    order_known: bool = True,
) -> Counter[Guarantee]:
    """Count the reduced gradient elements of a step, by guarantee.

    Args:
        step: The oracle's step.
        rank_count: Number of ranks in the sum.
        replica_count: Number of shard groups. Each is summed first, then the groups.
        order_known: True if the order of addition is known.
    """
    elems = sum(grad.numel() for grad in step.grads.values())
    # None if the oracle did not try to certify, so nothing counts as order-free.
    certified = sum(int(mask.sum()) for mask in (step.order_free or {}).values())
    # Both sums, within a shard group and over the groups, must have at most two terms.
    few = max(rank_count // replica_count, replica_count) <= 2
    rest: Guarantee = "one-sum" if few else "modelled-order" if order_known else "bound"
    counts: Counter[Guarantee] = Counter({"order-free": certified, rest: elems - certified})
    return +counts  # Without zeros.


def in_words(counts: Counter[Guarantee]) -> str:
    """Return the counts as a note."""
    parts = ", ".join(f"{count:,} {row}" for row, count in sorted(counts.items()))
    return f"elements of reduced gradients by guarantee: {parts}"


def width_in_words(counts: Counter[Guarantee], width: Width) -> str:
    """Return the width of the bounds as a note; empty without bounded elements."""
    if not counts["bound"] or not width.reach:
        # Intervals of a single value have no width.
        return ""
    share = 1 - width.signless / counts["bound"]
    return (
        f"bounds: a sum may differ from the exact one by {width.reach:.2g} x the sum of its terms' "
        f"magnitudes; {share:.1%} of the bounded elements must have the right sign"
    )
