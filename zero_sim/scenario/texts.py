"""Rules for a scenario's strings: length and allowed characters.

Reports and terminals print these strings, and file names contain them.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
import unicodedata
from collections.abc import Iterator

from zero_sim.errors import Problem
from zero_sim.scenario.fields import fields_of, is_table, values_at
from zero_sim.scenario.spec import Scenario
from zero_sim.untrusted import printable

NAME_CHARS_MAX = 1_000
"""Most characters in a name, a case id, and every string except the description."""
DESCRIPTION_CHARS_MAX = 10_000
"""Most characters in the description."""

_UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories: control and format characters, lone surrogates, line separators."""


def check_texts(scenario: Scenario) -> Iterator[Problem]:
    """Check a scenario's strings."""
    for field in _paths(Scenario):
        for path, text in values_at(scenario, field):
            if isinstance(text, str):
                yield from _check(path, text)


def check_case_id(case_id: str, *, named: bool) -> Iterator[Problem]:
    """Check a case id; `named` is True if the file contains `name`."""
    if named:
        yield from _check("name", case_id, what="case id")
        return
    # The id comes from the file's name, so renaming the file is a remedy.
    for problem in _check("", case_id, what="file name without name = ..."):
        yield dataclasses.replace(problem, suggestion="Rename the file, or write name = ... in it.")


@functools.cache
def _paths(record: type, prefix: str = "") -> tuple[str, ...]:
    """Return paths of string fields without choices, including list entries."""
    found: list[str] = []
    for name, expected in fields_of(record).items():
        # For a list, its entries' type. A `Literal` gives a choice, which is no type.
        inner = (typing.get_args(expected) or (expected,))[0]
        if is_table(inner):
            assert isinstance(inner, type)
            found.extend(_paths(inner, f"{prefix}{name}."))
        elif inner is str:
            found.append(f"{prefix}{name}")
    return tuple(found)


def _check(path: str, text: str, *, what: str = "string") -> Iterator[Problem]:
    # A shortcut for most strings: looking up each character's category is much slower.
    if len(text) <= NAME_CHARS_MAX and text.isprintable():
        return
    is_description = path == "description"
    most = DESCRIPTION_CHARS_MAX if is_description else NAME_CHARS_MAX
    if len(text) > most:
        yield Problem(
            path=path,
            message=f"expected a {what} of at most {most:,} characters, got {len(text):,}.",
            suggestion="Shorten it.",
        )
    # A description may have several lines, because it is only printed in TOML's escaped form.
    allowed = "\n\t" if is_description else ""
    for place, char in enumerate(text):
        if char not in allowed and unicodedata.category(char) in _UNSEEN:
            yield Problem(
                path=path,
                message=f"expected a {what} without control characters, "
                f"got '{printable(char)}' at character {place}.",
                suggestion="Leave it out.",
            )
            return
