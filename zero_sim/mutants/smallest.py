"""The table of smallest cases: for each mutant, the smallest case known that finds it.

`zero-sim mutants --shrink --record FILE` hunts, shrinks and writes it; the one that ships is read
here. It says which features of cases have ever found a mutant, those that are left when all that
can go is gone; and which cases are worth judging first where the mutant is hunted again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from zero_sim.errors import UsageError
from zero_sim.fuzz.features import features_of
from zero_sim.host.files import unwritten, write_whole
from zero_sim.mutants.records import Trial
from zero_sim.scenario.decode import decode
from zero_sim.scenario.dump import to_chosen_data
from zero_sim.scenario.load import parse_cases
from zero_sim.scenario.spec import Scenario
from zero_sim.untrusted import Unreadable, read_regular

SHIPPED = Path(__file__).with_name("smallest.json")
_BYTES_MAX = 1 << 24


@cache
def smallest_cases() -> Mapping[str, Scenario]:
    """The table that ships: by id of the mutant, the smallest case that its hunt came to."""
    return {id: _case(raw, id=id) for id, raw in _read(SHIPPED).items()}


@cache
def features_that_found() -> Mapping[str, frozenset[str]]:
    """By id of the mutant, the features of that case."""
    return {id: features_of(scenario) for id, scenario in smallest_cases().items()}


def record_smallest(trials: Iterable[Trial], path: Path) -> int:
    """Write the smallest cases of trials into a table; those of other mutants in it stay.

    Args:
        trials: What became of mutants; those that were not shrunk are left out.
        path: The table's file, which may not be there yet.

    Returns:
        How many were written.

    Raises:
        UsageError: There is something else, or it cannot be written.
    """
    table = dict(_read(path)) if path.exists() else {}
    fresh = {trial.id: _data(trial) for trial in trials if trial.smallest}
    # A line a mutant, so that a table can be read and compared.
    lines = (
        f"  {json.dumps(id)}: {json.dumps(raw)}" for id, raw in sorted((table | fresh).items())
    )
    text = ",\n".join(lines)
    try:
        write_whole(path, f"{{\n{text}\n}}\n".encode())
    except OSError as error:
        raise unwritten("smallest cases", path, error) from None
    return len(fresh)


def _data(trial: Trial) -> dict[str, object]:
    (scenario,) = parse_cases(trial.smallest, source=trial.id, stem=trial.id)
    data = to_chosen_data(scenario)
    return {name: value for name, value in data.items() if name not in ("name", "description")}


def _read(path: Path) -> Mapping[str, dict[str, object]]:
    try:
        table = json.loads(read_regular(path, bytes_max=_BYTES_MAX))
    except (Unreadable, ValueError) as reason:
        raise UsageError(
            f"expected a table of smallest cases in {path}, got a file that cannot be read: "
            f"{reason}. Try another file, or one that is not there yet."
        ) from None
    if not isinstance(table, dict) or not all(isinstance(raw, dict) for raw in table.values()):
        raise UsageError(
            f"expected a table of smallest cases in {path}, got something else. "
            "Try another file, or one that is not there yet."
        )
    return table


def _case(raw: dict[str, object], *, id: str) -> Scenario:
    scenario, problems = decode({"name": id, **raw})
    if scenario is None:
        raise UsageError(f"expected a valid case of mutant {id}, got one with {problems[0]}")
    return scenario
