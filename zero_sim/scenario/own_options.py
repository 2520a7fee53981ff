"""Options of a target's own in a case, as text by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from zero_sim.scenario.spec import OptionSpec, Scenario


def with_options(scenario: Scenario, said: Mapping[str, str]) -> Scenario:
    """The case with some options in the place of what it says of them.

    Args:
        scenario: Any case.
        said: Values as text, by name.
    """
    options = {option.name: option.value for option in scenario.system.options} | dict(said)
    specs = tuple(OptionSpec(name=name, value=value) for name, value in sorted(options.items()))
    return replace(scenario, system=replace(scenario.system, options=specs))
