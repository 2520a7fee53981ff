"""Guarantees: the reason why each element of a reduced gradient must match. There is no tolerance.

- `order-free`: the oracle certified that every order of addition gives these bits, so every backend
  must produce them.
- `one-sum`: at most two numbers are added at once. IEEE addition commutes, so there is only one
  order.
- `modelled-order`: the bits follow from the order that the world declares.
- `bound`: the order is unknown. The element must lie in an interval that is proven from the data
  (`zero_sim.reference.bounding`).

Everything after the sum is computed elementwise from it, so it has the same guarantee. With a
bound, it follows exactly from the reported sum.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from zero_sim.reference import BoundedStep, ReferenceStep

Guarantee = Literal["order-free", "one-sum", "modelled-order", "bound"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Width:
    """Freedom that the bounds of a case leave."""

    reach: float = 0.0
    """Largest distance of an order's result from the exact sum, relative to the sum of magnitudes.
    """
    signless: int = 0
    """Elements whose interval contains zero, so that not even their sign is determined."""

    def __add__(self, other: Width) -> Width:
        """Return the freedom of both together."""
        return Width(reach=max(self.reach, other.reach), signless=self.signless + other.signless)


def count_guarantees(
    step: ReferenceStep | BoundedStep,
    *,
    rank_count: int,
    replica_count: int,
    order_known: bool = True,
) -> Counter[Guarantee]:
    """Count the elements of a step's reduced gradient by guarantee.

    Args:
        step: The step as computed by the oracle; `order_free` is None if nothing was certified.
        rank_count: Number of ranks in the sum.
        replica_count: Number of shard groups that are summed first.
        order_known: True if the order of addition is known.
    """
    elems = sum(grad.numel() for grad in step.grads.values())
    # None means that the oracle looked for no certificate, so nothing counts as order-free.
    certified = sum(int(mask.sum()) for mask in (step.order_free or {}).values())
    # Two levels: within each shard group, then over the groups.
    few = max(rank_count // replica_count, replica_count) <= 2
    rest: Guarantee = "one-sum" if few else "modelled-order" if order_known else "bound"
    counts: Counter[Guarantee] = Counter({"order-free": certified, rest: elems - certified})
    return +counts  # Without zeros.


def in_words(counts: Counter[Guarantee]) -> str:
    """Return the counts as a note for the reader."""
    parts = ", ".join(f"{count:,} {row}" for row, count in sorted(counts.items()))
    return f"elements of reduced gradients by guarantee: {parts}"


def width_in_words(counts: Counter[Guarantee], width: Width) -> str:
    """Return the freedom of the bounds as a note; empty without bounded elements."""
    if not counts["bound"] or not width.reach:
        # Exact bounds leave no freedom to report.
        return ""
    share = 1 - width.signless / counts["bound"]
    return (
        f"bounds: a sum may differ from the exact one by {width.reach:.2g} x the sum of its terms' "
        f"magnitudes; {share:.1%} of the bounded elements must have the right sign"
    )
