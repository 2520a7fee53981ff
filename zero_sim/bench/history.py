"""The history of a machine's benchmarks: a line for each run, and what has got worse since.

Only ratios are held against earlier ones: of two things done in turns on one machine. What is worse
is measured again before it is believed.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from zero_sim.errors import UsageError
from zero_sim.host.files import unwritten
from zero_sim.report.records import Measurement, WorseRatio

WORSE_PERCENT = 15.0
_RUNS = 5
"""Earlier runs that count: the last ones."""
_AGAIN = 2
"""How often what looks worse is measured again."""


def read_history(path: Path) -> list[dict[str, float]]:
    """Values by name of each run on record; none where there is no file yet.

    Raises:
        UsageError: It is no history.
    """
    if not path.exists():
        return []
    runs = []
    try:
        for line in path.read_text().splitlines():
            rows = json.loads(line)["measurements"]
            runs.append({str(row["name"]): float(row["value"]) for row in rows})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"expected {path} to hold a line of JSON for each run of the benchmark, got "
            f"{type(error).__name__}: {error}. Try another file for --history."
        ) from None
    return runs


def append_history(path: Path, measurements: Sequence[Measurement], **about: str) -> None:
    """Add a run.

    Args:
        path: The file; made where it is not there.
        measurements: What was measured.
        about: What else is to be known of the run, such as versions.

    Raises:
        UsageError: It cannot be written.
    """
    line = json.dumps({**about, "measurements": [asdict(each) for each in measurements]})
    try:
        with path.open("a") as file:
            file.write(f"{line}\n")
    except OSError as error:
        raise unwritten("a history", path, error) from None


def find_worse(
    measurements: Iterable[Measurement],
    *,
    history: Sequence[dict[str, float]],
    again: Callable[[str], Measurement],
    worse_percent: float = WORSE_PERCENT,
) -> list[WorseRatio]:
    """Find the ratios that are worse than on record, also when they are measured again.

    Args:
        measurements: Of this run.
        history: Of earlier ones.
        again: Measures the figure of a name once more.
        worse_percent: By how much a ratio may be worse.
    """
    found = []
    for row in measurements:
        values = [run[row.name] for run in history[-_RUNS:] if row.name in run]
        if row.unit != "x" or not values:
            continue
        before, best, tries = statistics.median(values), row.value, _AGAIN
        while _is_worse(best, before, row=row, percent=worse_percent) and tries:
            value, tries = again(row.name).value, tries - 1
            best = max(best, value) if row.at_least else min(best, value)
        if _is_worse(best, before, row=row, percent=worse_percent):
            found.append(WorseRatio(name=row.name, value=best, before=before))
    return found


def _is_worse(value: float, before: float, *, row: Measurement, percent: float) -> bool:
    share = 1 + percent / 100
    return value * share < before if row.at_least else value > before * share
