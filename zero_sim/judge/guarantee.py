"""Guarantees: why the bits of a reduced gradient are owed, by element. There is no tolerance.

- `order-free`: the oracle certified that every order of addition gives these bits, so every backend
  owes them, whatever is known of it.
- `one-sum`: no more than two numbers are ever added at once. IEEE addition commutes, so there is
  only one order.
- `modelled-order`: the bits follow from the order that the world names, and from nothing else.
- `bound`: the order is not known, and what is owed is no bits but a place between two numbers,
  which are proven from the data (`zero_sim.reference.bounding`).

What comes after the sum is computed element by element, and owed with it: of a sum that lies
within its bound, whatever it is.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from zero_sim.reference import BoundedStep, ReferenceStep

Guarantee = Literal["order-free", "one-sum", "modelled-order", "bound"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Width:
    """How much the bounds of a case allow."""

    reach: float = 0.0
    """How far an order can end from the exact sum, as a part of the sum of magnitudes."""
    signless: int = 0
    """Elements under a bound that holds zero, so that not even their sign is owed."""

    def __add__(self, other: Width) -> Width:
        """Both together."""
        return Width(reach=max(self.reach, other.reach), signless=self.signless + other.signless)


def count_guarantees(
    step: ReferenceStep | BoundedStep,
    *,
    rank_count: int,
    replica_count: int,
    order_known: bool = True,
) -> Counter[Guarantee]:
    """How many elements of a step's reduced gradient stand under which row.

    Args:
        step: What the oracle computed. Where it did not look for a certificate, there is none.
        rank_count: Ranks that the gradient is summed over.
        replica_count: Blocks of ranks that are summed by themselves first.
        order_known: Whether the judge is told the order of addition.
    """
    elems = sum(grad.numel() for grad in step.grads.values())
    certified = sum(int(mask.sum()) for mask in (step.order_free or {}).values())
    few = max(rank_count // replica_count, replica_count) <= 2
    rest: Guarantee = "one-sum" if few else "modelled-order" if order_known else "bound"
    counts: Counter[Guarantee] = Counter({"order-free": certified, rest: elems - certified})
    return +counts


def in_words(counts: Counter[Guarantee]) -> str:
    """The counts as a reader's note."""
    parts = ", ".join(f"{count:,} {row}" for row, count in sorted(counts.items()))
    return f"elements of reduced gradients by why they are owed: {parts}"


def width_in_words(counts: Counter[Guarantee], width: Width) -> str:
    """How much bounds allow, as a reader's note; empty where nothing stands under one."""
    if not counts["bound"] or not width.reach:
        return ""
    share = 1 - width.signless / counts["bound"]
    return (
        f"bounds: a sum may end within {width.reach:.2g} x the sum of its terms' magnitudes of the "
        f"exact one; {share:.1%} of the elements under a bound owe at least their sign"
    )
