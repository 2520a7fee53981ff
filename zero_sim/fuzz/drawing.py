"""Draws values of a strategy one after another, none of them twice.

[Note: short runs]
In a long run Hypothesis draws a value and then goes on from it: it repeats parts of it, up to five
times, and of what comes of that many are the same again. Of 500 scenarios of one run 279 were
different. Before ten values, a run has not begun with that, so many short runs draw no two alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import count
from random import Random
from typing import TypeVar

from hypothesis import HealthCheck, Phase, Verbosity, find, settings
from hypothesis.errors import NoSuchExample, Unsatisfiable
from hypothesis.strategies import SearchStrategy

Value = TypeVar("Value", bound=Hashable)

_RUN_VALUES = 6
_FRUITLESS_RUNS_MAX = 10
"""After so many runs with nothing new, a strategy has nothing else to give."""
_SHORT = settings(
    max_examples=_RUN_VALUES,
    phases=(Phase.generate,),
    database=None,
    deadline=None,
    derandomize=False,
    suppress_health_check=list(HealthCheck),
    verbosity=Verbosity.quiet,
)


def draws(values_from: SearchStrategy[Value], *, seed: str) -> Iterator[Value]:
    """Values of a strategy, each once, the simplest first, until it seems to have no others.

    Args:
        values_from: What draws them; what it raises goes on to the caller, after the values that it
            drew before.
        seed: What they follow from: the same ones for the same seed. How many are taken does not
            matter.
    """
    met: set[Value] = set()
    fruitless = 0
    for run in count(1):
        drawn: list[Value] = []
        raised = _run(values_from, Random(f"{seed}/{run}"), into=drawn)
        fresh = [value for value in dict.fromkeys(drawn) if value not in met]
        met.update(fresh)
        yield from fresh
        if raised is not None:
            raise raised
        fruitless = 0 if fresh else fruitless + 1
        if fruitless > _FRUITLESS_RUNS_MAX:
            return


def _run(
    values_from: SearchStrategy[Value], random: Random, *, into: list[Value]
) -> Exception | None:
    """Draw a few values, the simplest first; what the strategy raised, if it did."""

    def note(value: Value) -> bool:
        into.append(value)
        return False

    try:
        find(values_from, note, settings=_SHORT, random=random)
    except (NoSuchExample, Unsatisfiable):
        return None
    except Exception as raised:  # noqa: BLE001
        return raised
    return None
