"""Draws values one after another, none of them twice."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from random import Random
from typing import TypeVar

from zero_sim.fuzz.choices import Drawable, Rejected, Seeded

Value = TypeVar("Value", bound=Hashable)

_FRUITLESS_DRAWS_MAX = 10_000
"""After so many in a row that gave nothing new, there is nothing else to draw."""


def draws(values_from: Drawable[Value], *, seed: str, simplest: bool = True) -> Iterator[Value]:
    """Values, each once, the simplest first, until there seem to be no others.

    Args:
        values_from: What draws them; what it raises goes on to the caller.
        seed: What they follow from: the same ones for the same seed. How many are taken does not
            matter.
        simplest: Whether the simplest one is there: it is the same for every seed.
    """
    met: set[Value] = set()
    random = Random(seed)
    fruitless = 0
    choices = Seeded(None if simplest else random)
    while fruitless <= _FRUITLESS_DRAWS_MAX:
        fruitless += 1
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
