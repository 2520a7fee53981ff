"""Drawing of distinct values."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from random import Random
from typing import TypeVar

from zero_sim.fuzz.choices import Drawable, Rejected, Seeded

Value = TypeVar("Value", bound=Hashable)

# After this many draws without a new value, assume that there are no others.
_FRUITLESS_DRAWS_MAX = 10_000


def draws(values_from: Drawable[Value], *, seed: str, simplest: bool = True) -> Iterator[Value]:
    """Yield distinct values until no new values come.

    Args:
        values_from: Source of values. Its exceptions propagate.
        seed: Determines the values, regardless of how many are taken.
        simplest: True to begin with the simplest value, which does not depend on the seed.
    """
    met: set[Value] = set()
    random = Random(seed)
    fruitless = 0
    choices = Seeded(None if simplest else random)
    while fruitless <= _FRUITLESS_DRAWS_MAX:
        fruitless += 1
        # Only the first draw may be the simplest value.
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
