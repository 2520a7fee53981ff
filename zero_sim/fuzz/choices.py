"""Sources of choices for drawn values: Hypothesis, which shrinks, or a seed, which is fast.

Values are functions of choices, so both sources can draw the same values. Hypothesis takes five to
ten times as long, because it records choices for shrinking. Campaigns do not need this: they have
their own shrinker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Generic, NoReturn, TypeVar

from hypothesis import HealthCheck, Phase, Verbosity, event, find, reject, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample, Unsatisfiable

Value = TypeVar("Value")
Other = TypeVar("Other")

# Few, because a user's strategy costs a Hypothesis run per case.
_RUN_VALUES = 6
_ONE_RUN = settings(
    max_examples=_RUN_VALUES,
    phases=(Phase.generate,),
    # No state between runs and no time limits, so that values depend on the seed alone.
    database=None,
    deadline=None,
    derandomize=False,
    suppress_health_check=list(HealthCheck),
    verbosity=Verbosity.quiet,
)


class Rejected(Exception):
    """The drawn value must be redrawn."""


@dataclass(frozen=True, slots=True)
class Shrinking:
    """Choices by Hypothesis. They shrink to the smallest number or first value.

    Args:
        draw: Draw function of a composite strategy.
    """

    draw: st.DrawFn

    def integer(self, least: int, most: int) -> int:
        """Return a number from `least` to `most`, inclusive."""
        return self.draw(st.integers(least, most))

    def among(self, values: Sequence[Value]) -> Value:
        """Return one of the values. There must be at least one."""
        return self.draw(st.sampled_from(values))

    def of(self, strategy: st.SearchStrategy[Value]) -> Value:
        """Return a value of a user's strategy."""
        return self.draw(strategy)

    def note(self, feature: str) -> None:
        """Record a feature for Hypothesis's statistics."""
        event(feature)

    def refuse(self) -> NoReturn:
        """Reject the value."""
        reject()


@dataclass(frozen=True, slots=True)
class Seeded:
    """Choices by a seed.

    Args:
        random: Source of randomness; None to always make the simplest choice.
    """

    random: Random | None

    def integer(self, least: int, most: int) -> int:
        """See `Shrinking`."""
        if self.random is None:
            return least
        # `random()` is several times faster than `randint`. Its bias does not matter here.
        return least + int(self.random.random() * (most - least + 1))

    def among(self, values: Sequence[Value]) -> Value:
        """See `Shrinking`."""
        # The first value is the simplest, as for Hypothesis.
        return values[0 if self.random is None else int(self.random.random() * len(values))]

    def of(self, strategy: st.SearchStrategy[Value]) -> Value:
        """See `Shrinking`.

        Raises:
            Rejected: The strategy has no values.
        """
        # The first value of a fixed seed serves as the simplest choice.
        drawn, raised = drawn_in_a_run(strategy, random=self.random or Random(0))
        if raised is not None:
            raise raised
        if not drawn:
            raise Rejected
        return self.among(drawn)

    def note(self, feature: str) -> None:
        """Do nothing: there are no statistics."""

    def refuse(self) -> NoReturn:
        """See `Shrinking`."""
        raise Rejected


Choices = Shrinking | Seeded
"""A source of choices."""


def drawn_in_a_run(
    strategy: st.SearchStrategy[Value], *, random: Random
) -> tuple[list[Value], Exception | None]:
    """Return a few values of a strategy, simplest first, and the exception that it raised.

    Args:
        strategy: Any Hypothesis strategy.
        random: Determines the values.
    """
    drawn: list[Value] = []

    # `find` searches for a value with a property. A property that no value has makes it generate
    # several.

    def keep(value: Value) -> bool:
        drawn.append(value)
        return False

    try:
        find(strategy, keep, settings=_ONE_RUN, random=random)
    except (NoSuchExample, Unsatisfiable):
        return drawn, None
    except Exception as raised:  # noqa: BLE001
        return drawn, raised
    return drawn, None


@dataclass(frozen=True, slots=True)
class Drawable(Generic[Value]):
    """Values that either source of choices can draw.

    Args:
        drawn: Returns a value, or calls `refuse`.
    """

    drawn: Callable[[Choices], Value]

    def map(self, change: Callable[[Value], Other]) -> Drawable[Other]:
        """Return the values with a function applied."""
        return Drawable(lambda choices: change(self.drawn(choices)))

    def filter(self, is_wanted: Callable[[Value], object]) -> Drawable[Value]:
        """Return the values that satisfy a condition."""

        def wanted(choices: Choices) -> Value:
            value = self.drawn(choices)
            return value if is_wanted(value) else choices.refuse()

        return Drawable(wanted)

    def strategy(self) -> st.SearchStrategy[Value]:
        """Return the values as a Hypothesis strategy."""

        @st.composite
        def values(draw: st.DrawFn) -> Value:
            return self.drawn(Shrinking(draw))

        return values()
