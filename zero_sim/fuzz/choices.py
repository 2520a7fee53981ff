"""Choices to draw values with: those of Hypothesis, which shrink, or of a seed, which are quick.

What is drawn is a function of choices, so that both give the same values. Hypothesis takes five to
ten times as long, for what it remembers in order to shrink; a campaign shrinks by itself.
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

_RUN_VALUES = 6
_ONE_RUN = settings(
    max_examples=_RUN_VALUES,
    phases=(Phase.generate,),
    database=None,
    deadline=None,
    derandomize=False,
    suppress_health_check=list(HealthCheck),
    verbosity=Verbosity.quiet,
)


class Rejected(Exception):
    """What was drawn is not wanted; another value may be."""


@dataclass(frozen=True, slots=True)
class Shrinking:
    """Choices of Hypothesis, one after another; what is simplest is the least, or the first.

    Args:
        draw: What a composite strategy is given.
    """

    draw: st.DrawFn

    def integer(self, least: int, most: int) -> int:
        """A number from the least to the most, both included."""
        return self.draw(st.integers(least, most))

    def among(self, values: Sequence[Value]) -> Value:
        """One of some values, of which there is at least one."""
        return self.draw(st.sampled_from(values))

    def of(self, strategy: st.SearchStrategy[Value]) -> Value:
        """A value that a strategy of somebody else gives."""
        return self.draw(strategy)

    def note(self, feature: str) -> None:
        """Say what the value has, for statistics."""
        event(feature)

    def refuse(self) -> NoReturn:
        """End here: the value is not wanted."""
        reject()


@dataclass(frozen=True, slots=True)
class Seeded:
    """Choices that follow from a seed.

    Args:
        random: Where they come from; the least each time without.
    """

    random: Random | None

    def integer(self, least: int, most: int) -> int:
        """See `Shrinking`."""
        if self.random is None:
            return least
        return least + int(self.random.random() * (most - least + 1))

    def among(self, values: Sequence[Value]) -> Value:
        """See `Shrinking`."""
        return values[0 if self.random is None else int(self.random.random() * len(values))]

    def of(self, strategy: st.SearchStrategy[Value]) -> Value:
        """See `Shrinking`.

        Raises:
            Rejected: It gives no values.
        """
        drawn, raised = drawn_in_a_run(strategy, random=self.random or Random(0))
        if raised is not None:
            raise raised
        if not drawn:
            raise Rejected
        return self.among(drawn)

    def note(self, feature: str) -> None:
        """See `Shrinking`; nobody keeps statistics."""

    def refuse(self) -> NoReturn:
        """See `Shrinking`."""
        raise Rejected


Choices = Shrinking | Seeded
"""What values are drawn with."""


def drawn_in_a_run(
    strategy: st.SearchStrategy[Value], *, random: Random
) -> tuple[list[Value], Exception | None]:
    """A few values of a strategy, the simplest first, and what it raised, if it did.

    Args:
        strategy: What draws them.
        random: What they follow from.
    """
    drawn: list[Value] = []

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
    """Values that can be drawn with any choices.

    Args:
        drawn: Gives one; raises whatever `refuse` of the choices does where it is not wanted.
    """

    drawn: Callable[[Choices], Value]

    def map(self, change: Callable[[Value], Other]) -> Drawable[Other]:
        """What becomes of each value."""
        return Drawable(lambda choices: change(self.drawn(choices)))

    def filter(self, is_wanted: Callable[[Value], object]) -> Drawable[Value]:
        """Only those that are wanted."""

        def wanted(choices: Choices) -> Value:
            value = self.drawn(choices)
            return value if is_wanted(value) else choices.refuse()

        return Drawable(wanted)

    def strategy(self) -> st.SearchStrategy[Value]:
        """A strategy of Hypothesis that gives them."""

        @st.composite
        def values(draw: st.DrawFn) -> Value:
            return self.drawn(Shrinking(draw))

        return values()
