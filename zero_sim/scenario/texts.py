"""Rules about the strings of a scenario: how long they may be, and what may not be in them.

They end up in reports, on terminals and in the names of files.
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
"""Characters of a name, of a case's id, and of all strings but descriptions."""
DESCRIPTION_CHARS_MAX = 10_000

_UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode's categories of control and format characters, halves of characters, line ends."""


def check_texts(scenario: Scenario) -> Iterator[Problem]:
    """Check all strings of a scenario."""
    for field in _paths(Scenario):
        for path, text in values_at(scenario, field):
            if isinstance(text, str):
                yield from _check(path, text)


def check_case_id(case_id: str, *, named: bool) -> Iterator[Problem]:
    """Check what a file makes of its own name, or of `name` and the values of its matrix.

    Args:
        case_id: The id of a case.
        named: Whether the file says its `name`.
    """
    if named:
        yield from _check("name", case_id, what="case id")
        return
    for problem in _check("", case_id, what="file name without name = ..."):
        yield dataclasses.replace(problem, suggestion="Rename the file, or write name = ... in it.")


@functools.cache
def _paths(record: type, prefix: str = "") -> tuple[str, ...]:
    """Paths of all fields that take any string, within lists too."""
    found: list[str] = []
    for name, expected in fields_of(record).items():
        inner = (typing.get_args(expected) or (expected,))[0]
        if is_table(inner):
            assert isinstance(inner, type)
            found.extend(_paths(inner, f"{prefix}{name}."))
        elif inner is str:
            found.append(f"{prefix}{name}")
    return tuple(found)


def _check(path: str, text: str, *, what: str = "string") -> Iterator[Problem]:
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
    # A description may have several lines; it is never printed but as TOML writes it.
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
