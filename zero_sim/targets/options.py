"""Options of a target's own: settings of its library that have no field in a scenario.

A case stores them as text, by name, so it can be read, compared and shrunk without the library. The
target declares the values of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from zero_sim.errors import Problem, ProtocolError, UsageError
from zero_sim.scenario.spec import Scenario
from zero_sim.targets.answers import shown
from zero_sim.targets.protocol import Target

# Types that a case can store as text.
OptionValue = bool | int | float | str


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option: its default, and the values of drawn cases.

    Example:
        >>> Option(default=25.0, values=(0.001, 1e-5)).default
        25.0

    Raises:
        UsageError: The default is no bool, int, float or str.
    """

    default: OptionValue
    """Value of a case that does not set the option. All values have its type."""
    values: object = ()
    """Values of drawn cases: a tuple, or a Hypothesis strategy. A text option accepts only the
    default and the values of a tuple."""
    fits: Callable[[Scenario], str] | None = None
    """Function that returns the reason why a case cannot have the option, "" if it can."""

    def __post_init__(self) -> None:
        """Check the type of the default."""
        # Not isinstance: a subclass such as numpy's float64 has no parser.
        if type(self.default) not in _PARSE:
            raise UsageError(
                "expected the default of an option to be true or false, a number or text, got "
                f"{shown(self.default)}."
            )


def options_of(target: Target) -> Mapping[str, Option]:
    """Return the options that a target declares, by name; empty if it declares none.

    Raises:
        ProtocolError: `options` is something else.
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
    """Return the value of every option of a target in a case: the case's own, or the default.

    Args:
        target: The target that declares the options.
        scenario: A case that the target does not refuse.
    """
    said = {option.name: option.value for option in scenario.system.options}
    # Every option, so that targets need no defaults of their own.
    return {
        name: parse(said[name], like=option.default) if name in said else option.default
        for name, option in options_of(target).items()
    }


def option_problems(target: Target, scenario: Scenario) -> Iterator[Problem]:
    """Yield a problem for each option of a case that a target lacks or cannot set.

    Args:
        target: The target that declares the options.
        scenario: Sets some of them.
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
        # A case is a list, in which a name may occur twice; the last value would win silently.
        if said.name in seen:
            message = f"expected each option once, got {said.name!r} again."
            yield Problem(path=f"{path}.name", message=message, suggestion="Leave one out.")
        seen.add(said.name)
        try:
            value = value_for(option, said.value)
        except UsageError as error:
            yield Problem(path=f"{path}.value", message=str(error), suggestion="")
            continue
        # The default always fits, because it changes nothing.
        why = "" if option.fits is None or value == option.default else option.fits(scenario)
        if why:
            yield Problem(
                path=path,
                message=f"expected a case that can have option {said.name!r}, got one with {why}.",
                suggestion="Leave it out.",
            )


def check_said(target: Target, said: Mapping[str, str]) -> None:
    """Check that a target has options of these names and accepts their values.

    Args:
        target: The target that declares the options.
        said: Values as text, by name.

    Raises:
        UsageError: An option is unknown, or its value is.
    """
    # Before any case is drawn, so a wrong --option is one error and not one for each case.
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
    """Parse a value.

    Args:
        text: Text of the value in a case, such as `true`.
        like: A value of the wanted type.

    Raises:
        UsageError: The text is no value of this type.
    """
    # By exact type: bool is a subclass of int, and has a parser of its own.
    try:
        return _PARSE[type(like)](text)
    except ValueError:
        raise UsageError(f"expected {_WORDS[type(like)]}, got {text!r}.") from None


def value_for(option: Option, text: str) -> OptionValue:
    """Parse a value of an option.

    Args:
        option: The option. If its values are a tuple of text, no other text is accepted.
        text: Text of the value in a case.

    Raises:
        UsageError: The text is no value of the option.
    """
    value = parse(text, like=option.default)
    listed = option.values
    # A strategy cannot be listed, so any text passes it. Numbers are free: tuples are examples.
    words = {option.default, *listed} if isinstance(listed, tuple) else set[OptionValue]()
    if isinstance(value, str) and len(words) > 1 and value not in words:
        names = ", ".join(sorted(map(str, words)))
        raise UsageError(f"expected one of {names}, got {text!r}.")
    return value


def written(value: OptionValue) -> str:
    """Return the text of a value in a case."""
    return str(value).lower() if isinstance(value, bool) else str(value)


# As in TOML; bool(text) would be True for "false".
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
