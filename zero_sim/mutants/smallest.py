"""Table of smallest cases: for each mutant, the smallest known case that finds it.

`zero-sim mutants --shrink --record FILE` writes such a table. This module reads the shipped table,
which shows the features that found a mutant, and decides which cases the next hunt judges first.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from zero_sim.errors import UsageError
from zero_sim.fuzz.features import features_of
from zero_sim.host.files import unwritten, write_whole
from zero_sim.mutants.records import HuntResult
from zero_sim.scenario.decode import decode
from zero_sim.scenario.dump import to_chosen_data
from zero_sim.scenario.load import parse_cases
from zero_sim.scenario.spec import Scenario
from zero_sim.untrusted import Unreadable, read_regular

SHIPPED = Path(__file__).with_name("smallest.json")
_BYTES_MAX = 1 << 24


@cache
def smallest_cases() -> Mapping[str, Scenario]:
    """Return the shipped table: smallest cases by mutant id."""
    return {id: _case(raw, id=id) for id, raw in _read(SHIPPED).items()}


@cache
def features_that_found() -> Mapping[str, frozenset[str]]:
    """Return the features of the smallest cases by mutant id."""
    return {id: features_of(scenario) for id, scenario in smallest_cases().items()}


def record_smallest(trials: Iterable[HuntResult], path: Path) -> int:
    """Merge the smallest cases of trials into a table. Entries of other mutants stay.

    Args:
        trials: Results of hunts. Trials without a shrunk case are skipped.
        path: File of the table, created if missing.

    Returns:
        Number of entries written.

    Raises:
        UsageError: The file is no such table, or cannot be written.
    """
    table = dict(_read(path)) if path.exists() else {}
    fresh = {result.id: _data(result) for result in trials if result.smallest}
    # A line per mutant, so that tables can be read and compared.
    lines = (
        f"  {json.dumps(id)}: {json.dumps(raw)}" for id, raw in sorted((table | fresh).items())
    )
    text = ",\n".join(lines)
    try:
        write_whole(path, f"{{\n{text}\n}}\n".encode())
    except OSError as error:
        raise unwritten("smallest cases", path, error) from None
    return len(fresh)


def _data(result: HuntResult) -> dict[str, object]:
    (scenario,) = parse_cases(result.smallest, source=result.id, stem=result.id)
    data = to_chosen_data(scenario)
    # The table's key names the case, and a drawn case's description no longer applies.
    return {name: value for name, value in data.items() if name not in ("name", "description")}


def _read(path: Path) -> Mapping[str, dict[str, object]]:
    try:
        table = json.loads(read_regular(path, bytes_max=_BYTES_MAX))
    except (Unreadable, ValueError) as reason:
        raise UsageError(
            f"expected a table of smallest cases in {path}, got a file that cannot be read: "
            f"{reason}. Choose another file, or a new one."
        ) from None
    if not isinstance(table, dict) or not all(isinstance(raw, dict) for raw in table.values()):
        raise UsageError(
            f"expected a table of smallest cases in {path}, got something else. "
            "Choose another file, or a new one."
        )
    return table


def _case(raw: dict[str, object], *, id: str) -> Scenario:
    scenario, problems = decode({"name": id, **raw})
    if scenario is None:
        raise UsageError(f"expected a valid case of mutant {id}, got one with {problems[0]}.")
    return scenario
