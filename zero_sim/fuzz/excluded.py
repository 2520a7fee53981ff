"""Target declarations that exclude every case."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from itertools import islice
from typing import Any

from zero_sim.errors import Problem
from zero_sim.fuzz.drawing import draws
from zero_sim.fuzz.strategies import drawn_cases
from zero_sim.scenario.spec import Scenario
from zero_sim.targets import (
    EVERYTHING,
    Capabilities,
    Numerics,
    Target,
    capabilities_of,
    refusals,
    with_options,
)

# Number of cases to draw, including refused cases.
_SAMPLE = 100
# Maximum characters of a declared value in the message.
_VALUE_MAX = 120


def why_none_fits(target: Target, *, options: Mapping[str, str] | None = None) -> str:
    """Return a message with the declarations that exclude every case.

    Args:
        target: Target for which no case can be drawn.
        options: The target's own options, set in all cases.
    """
    # Drop one declaration at a time. If a case then fits, the declaration is to blame.
    declared, lead = capabilities_of(target), f"no case fits target {target.name!r}"
    # An empty list excludes everything, and then no case can be drawn for the search below.
    for each in fields(Capabilities):
        if each.default and getattr(declared, each.name) == ():
            return f"{lead}: Capabilities.{each.name} is empty. Add at least one value"
    drawn = draws(drawn_cases(target, with_refused=True), seed="0")
    plain = list(islice(drawn, _SAMPLE))
    cases = [with_options(case, options) if options else case for case in plain]
    if not cases:
        return f"{lead}: none of its declared models can be drawn"
    refused = [refusals(target, case) for case in cases]
    blamed = [
        name
        for name, without in _relaxed(target)
        if any(not refusals(without, case) for case in cases)
    ]
    # A case would fit without the command line's options.
    if options and any(not refusals(target, case) for case in plain):
        text = " ".join(f"--option {name}={value}" for name, value in options.items())
        blamed.append(text)
    verb = "excludes" if len(blamed) == 1 else "together exclude"
    which = f"{' and '.join(blamed)} {verb} all" if blamed else "its declarations exclude all"
    return f"{lead}: {which} of {len(cases)} drawn cases, {_commonest(refused)}"


class _Without:
    """Target with a declaration replaced."""

    def __init__(self, target: Target, name: str, declared: object) -> None:
        self._target = target
        self.name = target.name
        setattr(self, name, declared)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def build(self, module: Any, **named: Any) -> Any:
        return self._target.build(module, **named)


def _relaxed(target: Target) -> Iterator[tuple[str, Target]]:
    """Yield each declaration in words, and the target without it."""
    declared = capabilities_of(target)
    for each in fields(Capabilities):
        value, anything = getattr(declared, each.name), getattr(EVERYTHING, each.name)
        if value != anything:
            relaxed = replace(declared, **{each.name: anything})
            text = repr(value)
            text = text if len(text) <= _VALUE_MAX else f"{text[:_VALUE_MAX]}..."
            yield f"Capabilities.{each.name} = {text}", _Without(target, "capabilities", relaxed)
    if getattr(target, "numerics", None) is not None:
        yield "`numerics`", _Without(target, "numerics", Numerics())
    if getattr(target, "refuses", None) is not None:
        yield "`refuses`", _Without(target, "refuses", _nothing)


def _nothing(scenario: Scenario) -> tuple[Problem, ...]:
    return ()


def _commonest(refused: list[tuple[Problem, ...]]) -> str:
    """Return the field that most refusals name, with one of their messages."""
    paths = Counter(path for found in refused for path in {problem.path for problem in found})
    (path, count) = paths.most_common(1)[0]
    problem = next(p for found in refused for p in found if p.path == path)
    return f"{count} of them for {path}: {problem.message.rstrip('.')}"
