"""Needs: what a case must have to show what a smallest case shows.

No fewer ranks, params, elements and steps, and each setting that is not as by default there, to
whatever value. All that could go of a smallest case is gone; but one by one, so that another case
may show the same without it, by other means.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from zero_sim.scenario.spec import Scenario
from zero_sim.shrink import Size, settings_of, size_of

_NO_NEED = frozenset({"model.name", "system.target", "optimizer.lr", "data.rows"})
"""Settings in which one value does as well as another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What a case must have."""

    size: Size
    settings: frozenset[str]
    """Paths of settings that are not as by default."""

    @classmethod
    def of(cls, smallest: Scenario) -> Self:
        """What a smallest case has."""
        return cls(size=size_of(smallest), settings=_settings_of(smallest))

    def met_by(self, scenario: Scenario) -> bool:
        """Whether a case has all of it."""
        size, least = size_of(scenario), self.size
        is_large_enough = (
            size.ranks >= least.ranks
            and size.params >= least.params
            # No search goes on to a case without elements.
            and max(size.elements, 1) >= least.elements
            and size.steps >= least.steps
        )
        return is_large_enough and self.settings <= _settings_of(scenario)


NOTHING = Needs(size=Size(ranks=0, params=0, elements=0, steps=0, features=0), settings=frozenset())
"""What any case has."""


def _settings_of(scenario: Scenario) -> frozenset[str]:
    return settings_of(scenario) - _NO_NEED
