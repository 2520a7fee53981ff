"""Why the bits of a reduced gradient are owed, element by element. There is no tolerance.

- `order-free`: the oracle certified that every order of addition gives these bits, so every backend
  owes them, whatever is known of it.
- `one-sum`: no more than two numbers are ever added at once. IEEE addition commutes, so there is
  only one order.
- `modelled-order`: the bits follow from the order that the world names, and from nothing else.

What comes after the sum is computed element by element, and owed with it.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from zero_sim.reference import ReferenceStep

Row = Literal["order-free", "one-sum", "modelled-order"]


def count_rows(step: ReferenceStep, *, rank_count: int, replica_count: int) -> Counter[Row]:
    """How many elements of a step's reduced gradient stand under which row.

    Args:
        step: What the oracle computed. Where it did not look for a certificate, there is none.
        rank_count: Ranks that the gradient is summed over.
        replica_count: Blocks of ranks that are summed by themselves first.
    """
    elems = sum(grad.numel() for grad in step.grads.values())
    certified = sum(int(mask.sum()) for mask in (step.order_free or {}).values())
    few = max(rank_count // replica_count, replica_count) <= 2
    rest: Row = "one-sum" if few else "modelled-order"
    counts: Counter[Row] = Counter({"order-free": certified, rest: elems - certified})
    return +counts


def in_words(counts: Counter[Row]) -> str:
    """The counts as a reader's note."""
    parts = ", ".join(f"{count:,} {row}" for row, count in sorted(counts.items()))
    return f"elements of reduced gradients by why they are owed: {parts}"
