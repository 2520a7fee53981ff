"""Cases found by paths of the command line: files and folders, as far as they can be read."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from zero_sim.errors import Problem, ScenarioError
from zero_sim.scenario.load import load_cases
from zero_sim.scenario.select import compile_expression
from zero_sim.scenario.spec import Scenario
from zero_sim.scenario.texts import NAME_CHARS_MAX
from zero_sim.untrusted import printable

_NOT_SCENARIOS = frozenset({"pyproject.toml"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One case and the file that it comes from."""

    id: str
    """Unique among all cases found; the scenario's `name`."""
    file_id: str
    """The same as the file alone has it."""
    scenario: Scenario
    source: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Discovery:
    """What a set of paths holds."""

    cases: tuple[Case, ...]
    passed_over_count: int
    """Cases that the expression did not select."""
    errors: tuple[ScenarioError, ...]
    """One for each file that is no scenario; the cases of the others are in `cases`."""


def discover(paths: Iterable[str | Path], *, expression: str = "") -> Discovery:
    """Load every scenario under some paths.

    Args:
        paths: Files, or folders that are searched to any depth for `*.toml`, sorted by path.
            Hidden files and folders and `pyproject.toml` are passed over.
        expression: A `-k` expression over case ids; blank for all.

    Returns:
        The selected cases, in order, each file once; and an error for each file not readable.

    Raises:
        UsageError: when the expression is malformed.
    """
    selected = compile_expression(expression)
    cases: list[Case] = []
    errors: list[ScenarioError] = []
    for path in _files(paths, errors):
        try:
            scenarios = load_cases(path)
        except ScenarioError as error:
            errors.append(error)
            continue
        cases.extend(
            Case(id=scenario.name, file_id=scenario.name, scenario=scenario, source=path)
            for scenario in scenarios
        )
    unique = _with_unique_ids(cases)
    chosen = tuple(case for case in unique if selected(case.id))
    return Discovery(
        cases=chosen, passed_over_count=len(unique) - len(chosen), errors=tuple(errors)
    )


def _files(paths: Iterable[str | Path], errors: list[ScenarioError]) -> list[Path]:
    found: dict[str, Path] = {}
    for given in paths:
        path = Path(given)
        inside = _search(path, errors) if os.path.isdir(path) else [path]
        if not inside:
            problem = Problem(
                path="",
                message="expected a folder with scenarios, got one without any *.toml file.",
                suggestion="Name a scenario file or another folder.",
            )
            errors.append(ScenarioError(str(path), [problem]))
        for file in inside:
            # A link counts as itself, so that it is refused and the file that it leads to is not.
            found.setdefault(os.path.join(os.path.realpath(file.parent), file.name), file)
    return list(found.values())


def _search(folder: Path, errors: list[ScenarioError]) -> list[Path]:
    def unreadable(error: OSError) -> None:
        problem = Problem(
            path="",
            message=f"expected a readable folder, got: {error.strerror}.",
            suggestion="Check its permissions.",
        )
        errors.append(ScenarioError(str(error.filename), [problem]))

    files: list[Path] = []
    for here, folders, names in os.walk(folder, onerror=unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files.extend(
            Path(here, name)
            for name in names
            if name.endswith(".toml") and not name.startswith(".") and name not in _NOT_SCENARIOS
        )
    return sorted(files)


def _with_unique_ids(cases: Sequence[Case]) -> list[Case]:
    """Put the folder's name before ids that two files share, the whole path if need be."""
    for prefix in (lambda source: source.resolve().parent.name, lambda source: source.as_posix()):
        times = Counter(case.id for case in cases)
        cases = [
            case if times[case.id] == 1 else _renamed(case, f"{prefix(case.source)}/{case.id}")
            for case in cases
        ]
    return list(cases)


def _renamed(case: Case, case_id: str) -> Case:
    # A folder may be called anything, and lie as deep as it likes.
    case_id = printable(case_id)[-NAME_CHARS_MAX:]
    scenario = dataclasses.replace(case.scenario, name=case_id)
    return dataclasses.replace(case, id=case_id, scenario=scenario)
