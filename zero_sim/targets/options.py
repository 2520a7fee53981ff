"""Options of a target's own: what its library can be set to, which no scenario has a field for.

A case has them as text, by name, so that it needs no library to be read, compared and made smaller;
a target says what each can be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from zero_sim.errors import Problem, ProtocolError, UsageError
from zero_sim.scenario.spec import Scenario
from zero_sim.targets.answers import shown
from zero_sim.targets.protocol import Target

OptionValue = bool | int | float | str


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option: its default, and what is drawn besides.

    Raises:
        UsageError: The default is of no type that an option can have.
    """

    default: OptionValue
    """What a case has that says nothing; its type is that of all values."""
    values: object = ()
    """What cases draw: a tuple of values, or a Hypothesis strategy that gives them. Text can be no
    other than what a tuple has, or the default."""
    fits: Callable[[Scenario], str] | None = None
    """Says of a case why it cannot have the option at all; '' where it can."""

    def __post_init__(self) -> None:
        """Refuse a default of another type."""
        if type(self.default) not in _PARSE:
            raise UsageError(
                "expected the default of an option to be true or false, a number or text, got "
                f"{shown(self.default)}."
            )


def options_of(target: Target) -> Mapping[str, Option]:
    """The options that a target declares, by name; none where it declares nothing.

    Raises:
        ProtocolError: It declares something else.
    """
    declared: object = getattr(target, "options", None)
    if declared is None:
        return {}
    fine = isinstance(declared, Mapping) and all(
        isinstance(name, str) and isinstance(option, Option) for name, option in declared.items()
    )
    if not fine:
        raise ProtocolError(
            f"expected 'options' of target {target.name!r} to be a mapping of names to "
            f"zero_sim.targets.Option, got {shown(declared)}."
        )
    return declared  # pyrefly: ignore


def chosen_options(target: Target, scenario: Scenario) -> dict[str, OptionValue]:
    """The value of every option of a target in a case: what the case says, or the default.

    Args:
        target: Whose options they are.
        scenario: A case that the target is not refused.
    """
    said = {option.name: option.value for option in scenario.system.options}
    return {
        name: parse(said[name], like=option.default) if name in said else option.default
        for name, option in options_of(target).items()
    }


def option_problems(target: Target, scenario: Scenario) -> Iterator[Problem]:
    """What of a case's options a target does not have, each with the path to it.

    Args:
        target: Whose options they are.
        scenario: The case that is asked for.
    """
    known, seen = options_of(target), set[str]()
    for index, said in enumerate(scenario.system.options):
        path = f"system.options[{index}]"
        option = known.get(said.name)
        if option is None:
            near = get_close_matches(said.name, known, n=1)
            have = ", ".join(known) or "none"
            yield Problem(
                path=f"{path}.name",
                message=f"expected an option of this target ({have}), got {said.name!r}.",
                suggestion=f"Try {near[0]!r}." if near else "Leave it out.",
            )
            continue
        if said.name in seen:
            message = f"expected each option once, got {said.name!r} again."
            yield Problem(path=f"{path}.name", message=message, suggestion="Leave one out.")
        seen.add(said.name)
        try:
            value = value_for(option, said.value)
        except UsageError as error:
            yield Problem(path=f"{path}.value", message=str(error), suggestion="")
            continue
        why = "" if option.fits is None or value == option.default else option.fits(scenario)
        if why:
            yield Problem(
                path=path,
                message=f"expected a case that can have option {said.name!r}, got one with {why}.",
                suggestion="Leave it out.",
            )


def check_said(target: Target, said: Mapping[str, str]) -> None:
    """Check that a target has some options, and can have these values of them.

    Args:
        target: Whose options they are.
        said: Values as text, by name.

    Raises:
        UsageError: It has not.
    """
    known = options_of(target)
    for name, text in said.items():
        if name not in known:
            have = ", ".join(known) or "none"
            raise UsageError(
                f"expected --option to name one of target {target.name!r} ({have}), got {name!r}."
            )
        try:
            value_for(known[name], text)
        except UsageError as error:
            raise UsageError(f"--option {name}: {error}") from None


def parse(text: str, *, like: OptionValue) -> OptionValue:
    """The value that a text stands for.

    Args:
        text: As a case has it.
        like: A value of the type.

    Raises:
        UsageError: It stands for none.
    """
    try:
        return _PARSE[type(like)](text)
    except ValueError:
        raise UsageError(f"expected {_WORDS[type(like)]}, got {text!r}.") from None


def value_for(option: Option, text: str) -> OptionValue:
    """The value of an option that a text stands for.

    Args:
        option: What can be words has no others than those that cases draw, where these are listed.
        text: As a case has it.

    Raises:
        UsageError: It stands for none.
    """
    value = parse(text, like=option.default)
    listed = option.values
    words = {option.default, *listed} if isinstance(listed, tuple) else set[OptionValue]()
    if isinstance(value, str) and len(words) > 1 and value not in words:
        names = ", ".join(sorted(map(str, words)))
        raise UsageError(f"expected one of {names}, got {text!r}.")
    return value


def written(value: OptionValue) -> str:
    """A value as a case has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _truth(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(text)
    return text == "true"


_WORDS: Mapping[type, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
}
_PARSE: Mapping[type, Callable[[str], OptionValue]] = {
    bool: _truth,
    int: int,
    float: float,
    str: str,
}
