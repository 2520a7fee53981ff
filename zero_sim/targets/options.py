"""Options: settings of a target's library that scenarios have no field for.

A case stores options as text, by name, so it can be read, compared and shrunk without the library.
The target declares their values.
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
    """An option's default, and its values in drawn cases.

    Example:
        >>> Option(default=25.0, values=(0.001, 1e-5)).default
        25.0

    Raises:
        UsageError: The default is no bool, int, float or str.
    """

    default: OptionValue
    """Value if a case does not set the option. All values have this type."""
    values: object = ()
    """Values in drawn cases: a tuple, or a Hypothesis strategy. If a text option lists values in a
    tuple, it accepts only these and the default."""
    fits: Callable[[Scenario], str] | None = None
    """Function that returns the reason why a case cannot set the option; "" if it can."""

    def __post_init__(self) -> None:
        """Check the type of the default."""
        # Not isinstance, because subclasses such as numpy's float64 have no parser.
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
    """Return the values of all options of a target in a case, set or default.

    Args:
        target: The target that declares the options.
        scenario: A case that the target does not refuse.
    """
    chosen = {option.name: option.value for option in scenario.system.options}
    # Includes defaults, so targets need not repeat them.
    return {
        name: parse(chosen[name], like=option.default) if name in chosen else option.default
        for name, option in options_of(target).items()
    }


def option_problems(target: Target, scenario: Scenario) -> Iterator[Problem]:
    """Yield a problem for each option in a case that a target lacks or cannot set."""
    known, seen = options_of(target), set[str]()
    for index, chosen in enumerate(scenario.system.options):
        path = f"system.options[{index}]"
        option = known.get(chosen.name)
        if option is None:
            near = get_close_matches(chosen.name, known, n=1)
            have = ", ".join(known) or "none"
            yield Problem(
                path=f"{path}.name",
                message=f"expected an option of this target ({have}), got {chosen.name!r}.",
                suggestion=f"Try {near[0]!r}." if near else "Remove it.",
            )
            continue
        # A case lists options, so a name may occur twice, and its last value would silently win.
        if chosen.name in seen:
            message = f"expected each option once, got {chosen.name!r} again."
            yield Problem(path=f"{path}.name", message=message, suggestion="Remove one.")
        seen.add(chosen.name)
        try:
            value = value_for(option, chosen.value)
        except UsageError as error:
            yield Problem(path=f"{path}.value", message=str(error), suggestion="")
            continue
        # The default always fits, because it changes nothing.
        why = "" if option.fits is None or value == option.default else option.fits(scenario)
        if why:
            yield Problem(
                path=path,
                message=f"expected a case that can have option {chosen.name!r}, got one with "
                f"{why}.",
                suggestion="Remove it.",
            )


def check_given(target: Target, chosen: Mapping[str, str]) -> None:
    """Check that a target has these options and accepts their values.

    Raises:
        UsageError: An option is unknown, or its value is.
    """
    # Called before any case is drawn, so a wrong --option is a single error, not one for each case.
    known = options_of(target)
    for name, text in chosen.items():
        if name not in known:
            have = ", ".join(known) or "none"
            raise UsageError(
                f"expected --option to name an option of target {target.name!r} ({have}), got "
                f"{name!r}."
            )
        try:
            value_for(known[name], text)
        except UsageError as error:
            raise UsageError(f"--option {name}: {error}") from None


def parse(text: str, *, like: OptionValue) -> OptionValue:
    """Parse a value, such as `true`, as the type of `like`.

    Raises:
        UsageError: The text is no value of this type.
    """
    # By exact type, because bool is a subclass of int but has another parser.
    try:
        return _PARSE[type(like)](text)
    except ValueError:
        raise UsageError(f"expected {_WORDS[type(like)]}, got {text!r}.") from None


def value_for(option: Option, text: str) -> OptionValue:
    """Parse an option's value.

    Raises:
        UsageError: The text is no value of the option.
    """
    value = parse(text, like=option.default)
    listed = option.values
    # A strategy cannot be listed, so it accepts any text. Numbers in a tuple are only examples.
    words = {option.default, *listed} if isinstance(listed, tuple) else set[OptionValue]()
    if isinstance(value, str) and len(words) > 1 and value not in words:
        names = ", ".join(sorted(map(str, words)))
        raise UsageError(f"expected one of {names}, got {text!r}.")
    return value


def written(value: OptionValue) -> str:
    """Return a value as text for a case."""
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
