"""Drawing of distinct values."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from random import Random
from typing import TypeVar

from zero_sim.fuzz.choices import Drawable, Rejected, Seeded

Value = TypeVar("Value", bound=Hashable)

# Draws in a row without a new value after which there are taken to be no others.
_FRUITLESS_DRAWS_MAX = 10_000


def draws(values_from: Drawable[Value], *, seed: str, simplest: bool = True) -> Iterator[Value]:
    """Yield distinct values until there seem to be no others.

    Args:
        values_from: Source of values. Its exceptions propagate.
        seed: Determines the values, however many are taken.
        simplest: True to begin with the simplest value, which is the same for every seed.
    """
    met: set[Value] = set()
    random = Random(seed)
    fruitless = 0
    choices = Seeded(None if simplest else random)
    while fruitless <= _FRUITLESS_DRAWS_MAX:
        fruitless += 1
        # Only the first draw may be the simplest one.
        try:
            value = values_from.drawn(choices)
        except Rejected:
            continue
        finally:
            choices = Seeded(random)
        if value not in met:
            met.add(value)
            fruitless = 0
            yield value
