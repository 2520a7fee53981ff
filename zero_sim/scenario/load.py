"""Loader for scenario files: reads, expands and validates them, with all problems at once."""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

from zero_sim.errors import Problem, ScenarioError, UsageError
from zero_sim.scenario.decode import PROBLEMS_MAX, decode
from zero_sim.scenario.matrix import Variant, expand
from zero_sim.scenario.spec import Scenario
from zero_sim.scenario.texts import check_case_id
from zero_sim.untrusted import NESTING_MAX, Unreadable, nests_too_deep, read_regular

FILE_BYTES_MAX = 2**20
"""Largest scenario file. People write scenarios by hand, so a larger file is a mistake."""

# tomllib appends the position to its message.
_TOML_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")
_IDS_SHOWN = 3


def load_cases(path: str | Path) -> tuple[Scenario, ...]:
    """Load all cases in a scenario file, in matrix order.

    Args:
        path: A TOML file.

    Returns:
        At least one scenario, each with its case id as `name`.

    Raises:
        ScenarioError: The file is invalid; the error lists all its problems.
    """
    path = Path(path)
    return parse_cases(_read(path), source=str(path), stem=path.stem)


def read_toml(path: str | Path, *, instead: str) -> dict[str, object]:
    """Read a TOML file that is not a scenario; `instead` is the remedy if it cannot be read.

    Raises:
        ScenarioError: The file cannot be read, or is not TOML.
    """
    path = Path(path)
    return _parse(_read(path, instead=instead), str(path))


def load_scenario(path: str | Path, *, case: str | None = None) -> Scenario:
    """Load a single case from a scenario file.

    Args:
        path: A TOML file.
        case: Case id; required if the file's matrix makes several cases.

    Returns:
        The scenario, with its case id as `name`.

    Raises:
        ScenarioError: The file is invalid; the error lists all its problems.
        UsageError: The file has no such case, or has several and `case` is None.
    """
    scenarios = load_cases(path)
    # A file with a single case needs no id.
    if case is None and len(scenarios) == 1:
        return scenarios[0]
    for scenario in scenarios:
        if scenario.name == case:
            return scenario
    ids = _some([scenario.name for scenario in scenarios])
    if case is None:
        raise UsageError(
            f"{path}: expected a file with one case, got {len(scenarios)} ({ids}). "
            "Try one of them, case=... or --case, or load_cases() for all."
        )
    raise UsageError(f"{path}: expected the id of one of its cases ({ids}), got case={case!r}.")


def parse_cases(text: str, *, source: str, stem: str) -> tuple[Scenario, ...]:
    """Parse all cases in a scenario's TOML text.

    Args:
        text: The file's content.
        source: The file's name in messages.
        stem: The cases' name, unless the text has a `name`.

    Returns:
        At least one scenario, each with its case id as `name`.

    Raises:
        ScenarioError: The text is invalid; the error lists all its problems.
    """
    raw = _parse(text, source)
    variants, problems = expand(raw)
    name = raw.get("name")
    # `decode` reports a name of the wrong type, so go on with the stem.
    base = name if isinstance(name, str) and name else stem
    scenarios: list[Scenario] = []
    # Most problems occur in all cases of a matrix, so report each once.
    found: dict[Problem, list[str]] = {}
    for variant in variants:
        case_id = _case_id(base, variant)
        scenario, wrong = decode(variant.raw)
        if scenario is not None:
            scenarios.append(dataclasses.replace(scenario, name=case_id))
            # For valid cases only, because ids contain the values.
            wrong = list(check_case_id(case_id, named=base == name))
        for problem in wrong:
            found.setdefault(problem, []).append(case_id)
    problems.extend(
        # A problem in all cases belongs to the file.
        problem if len(ids) == len(variants) else _in_cases(problem, ids)
        for problem, ids in found.items()
    )
    if len(problems) > PROBLEMS_MAX + 1:
        more = f"{len(problems) - PROBLEMS_MAX:,} more problems."
        # `decode` limits problems per case, but a file may have many cases.
        problems[PROBLEMS_MAX:] = [Problem(path="", message=more)]
    if problems:
        raise ScenarioError(source, problems)
    return tuple(scenarios)


def _case_id(base: str, variant: Variant) -> str:
    return f"{base}/{variant.label}" if variant.label else base


def _in_cases(problem: Problem, ids: Sequence[str]) -> Problem:
    word = "case" if len(ids) == 1 else "cases"
    message = f"{problem.message.removesuffix('.')} (in {word} {_some(ids)})."
    return dataclasses.replace(problem, message=message)


def _some(ids: Sequence[str]) -> str:
    shown = ", ".join(ids[:_IDS_SHOWN])
    more = len(ids) - _IDS_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def _read(path: Path, *, instead: str = "Name a scenario, or a folder with some.") -> str:
    def refuse(message: str, suggestion: str) -> ScenarioError:
        problem = Problem(path="", message=message, suggestion=suggestion)
        return ScenarioError(str(path), [problem])

    if not os.path.lexists(path):
        raise refuse("expected a TOML file, got nothing at this path.", "Check the path.")
    try:
        # Do not follow links: in a stranger's folder, a link could lead to any file, and an error
        # would print a line from it.
        data = read_regular(path, bytes_max=FILE_BYTES_MAX, follow=False)
    except Unreadable as reason:
        if path.is_symlink():
            instead = "Put a copy of the file in place of the link."
        raise refuse(
            f"expected a TOML file of at most {FILE_BYTES_MAX:,} bytes, got: {reason}.",
            instead,
        ) from None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise refuse(
            f"expected UTF-8 text, got byte {data[error.start]:#04x} at offset {error.start}.",
            "Save the file as UTF-8.",
        ) from None


def _parse(text: str, source: str) -> dict[str, object]:
    try:
        # Some editors write a byte order mark, which tomllib refuses.
        raw = tomllib.loads(text.removeprefix("\ufeff"))
        # Copying or printing deeper values would exceed Python's recursion limit.
        if not nests_too_deep(raw):
            return raw
        reason, place = f"more than {NESTING_MAX} tables or arrays within each other", None
    except RecursionError:
        reason, place = "too many brackets within brackets", None
    except ValueError as error:
        place = _TOML_PLACE.search(str(error))
        reason = _TOML_PLACE.sub("", str(error))
    # Show the line itself, because most errors are a missing quote or bracket.
    line = int(place[1]) if place and place[1] else None
    lines = text.splitlines()
    if line is None:
        where = " at the end of the file" if place else ""
    else:
        where = f" at line {line}, column {place[2] if place else ''}"
    suggestion = "Look for a bracket or quote that was never closed."
    if line is not None and line <= len(lines) and lines[line - 1].strip():
        suggestion = f"The line reads: {lines[line - 1].strip()[:80]}"
    message = f"expected valid TOML, got an error{where}: {reason[:1].lower()}{reason[1:]}."
    raise ScenarioError(source, [Problem(path="", message=message, suggestion=suggestion)])
