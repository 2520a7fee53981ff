"""Draws values one after another, none of them twice.

[Note: short runs]
In a long run Hypothesis draws a value and then goes on from it: it repeats parts of it, up to five
times, and of what comes of that many are the same again. Of 500 scenarios of one run 279 were
different. Before ten values, a run has not begun with that, so many short runs draw no two alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import count, islice
from random import Random
from typing import TypeVar

from hypothesis.strategies import SearchStrategy

from zero_sim.fuzz.choices import Drawable, Rejected, Seeded, ValuesFrom, drawn_in_a_run

Value = TypeVar("Value", bound=Hashable)

_FRUITLESS_RUNS_MAX = 10
_FRUITLESS_DRAWS_MAX = 10_000
"""After so many in a row that gave nothing new, there is nothing else to draw."""


def draws(values_from: ValuesFrom[Value], *, seed: str, simplest: bool = True) -> Iterator[Value]:
    """Values, each once, the simplest first, until there seem to be no others.

    Args:
        values_from: What draws them; what it raises goes on to the caller, after the values that it
            drew before. What is drawable with any choices is quicker than a strategy by far.
        seed: What they follow from: the same ones for the same seed. How many are taken does not
            matter.
        simplest: Whether the simplest one is there: it is the same for every seed.
    """
    if isinstance(values_from, Drawable):
        return _one_by_one(values_from, seed=seed, simplest=simplest)
    return islice(_by_runs(values_from, seed=seed), 0 if simplest else 1, None)


def _one_by_one(values_from: Drawable[Value], *, seed: str, simplest: bool) -> Iterator[Value]:
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


def _by_runs(values_from: SearchStrategy[Value], *, seed: str) -> Iterator[Value]:
    met: set[Value] = set()
    fruitless = 0
    for run in count(1):
        drawn, raised = drawn_in_a_run(values_from, random=Random(f"{seed}/{run}"))
        fresh = [value for value in dict.fromkeys(drawn) if value not in met]
        met.update(fresh)
        yield from fresh
        if raised is not None:
            raise raised
        fruitless = 0 if fresh else fruitless + 1
        if fruitless > _FRUITLESS_RUNS_MAX:
            return
