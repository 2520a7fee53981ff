"""Strategies for the options that a target has of its own."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from zero_sim.errors import ProtocolError
from zero_sim.fuzz.choices import Choices
from zero_sim.scenario.spec import Scenario
from zero_sim.targets import Option, Target, options_of, with_options
from zero_sim.targets.options import OptionValue, written


def with_drawn_options(choices: Choices, scenario: Scenario, *, target: Target) -> Scenario:
    """The case with options of the target drawn; half of the cases have none.

    Args:
        choices: What they are drawn with.
        scenario: The case that gets them.
        target: Whose options they are.

    Raises:
        ProtocolError: An option draws values of another type than that of its default.
    """
    options = options_of(target)
    if not options or not choices.among((False, True)):
        return scenario
    said: dict[str, str] = {}
    for name, option in options.items():
        if option.fits is not None and option.fits(scenario):
            continue
        # By default first: that is what a case shrinks to.
        is_other = choices.among((False, True))
        value = _value(choices, name, option, target) if is_other else option.default
        if type(value) is not type(option.default):
            raise ProtocolError(
                f"expected option {name!r} of target {target.name!r} to draw values like its "
                f"default, {option.default!r}, got {value!r}."
            )
        if value != option.default:
            choices.note(f"option {name}")
            said[name] = written(value)
    return with_options(scenario, said) if said else scenario


def _value(choices: Choices, name: str, option: Option, target: Target) -> OptionValue:
    values = option.values
    if isinstance(values, st.SearchStrategy):
        return choices.of(values)
    if isinstance(values, Sequence) and not isinstance(values, str):
        return choices.among(list(values) or [option.default])
    raise ProtocolError(
        f"expected values of option {name!r} of target {target.name!r} to be a tuple or a "
        f"Hypothesis strategy, got {values!r}."
    )
