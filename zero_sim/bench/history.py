"""History of a machine's benchmarks, with a line for each run, and regressions since.

Only ratios of two pieces of work done in turns are compared, because other figures depend on the
machine's load. A regression is only reported after repeated measurements.
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
"""Number of latest runs to compare with."""
_AGAIN = 2
"""Number of further measurements if there seems to be a regression."""


def read_history(path: Path) -> list[dict[str, float]]:
    """Return each recorded run's values by name; empty if there is no file yet.

    Raises:
        UsageError: The file is no history.
    """
    if not path.exists():
        return []
    runs = []
    try:
        for line in path.read_text().splitlines():
            rows = json.loads(line)["measurements"]
            runs.append({str(row["name"]): float(row["value"]) for row in rows})
    # JSON of another form raises KeyError or TypeError.
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"expected {path} to contain a line of JSON for each run of the benchmark, got "
            f"{type(error).__name__}: {error}. Choose another file for --history."
        ) from None
    return runs


def append_history(path: Path, measurements: Sequence[Measurement], **about: str) -> None:
    """Append a run to the history, with facts about it, such as versions.

    Raises:
        UsageError: The file cannot be written.
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
    """Find ratios that are worse than in the history, even if measured again.

    Args:
        measurements: This run's measurements.
        history: Values of earlier runs, by name.
        again: Function that measures a figure again, by name.
        worse_percent: Tolerated loss, in percent.
    """
    found = []
    for row in measurements:
        values = [run[row.name] for run in history[-_RUNS:] if row.name in run]
        # Other units depend on the machine and its load.
        if row.unit != "x" or not values:
            continue
        # Compare the best value of this run with the median of earlier runs, so that noise does not
        # look like a loss.
        before, best, tries = statistics.median(values), row.value, _AGAIN
        while _is_worse(best, before, row=row, percent=worse_percent) and tries:
            value, tries = again(row.name).value, tries - 1
            best = max(best, value) if row.at_least else min(best, value)
        if _is_worse(best, before, row=row, percent=worse_percent):
            found.append(WorseRatio(name=row.name, value=best, before=before))
    return found


def _is_worse(value: float, before: float, *, row: Measurement, percent: float) -> bool:
    # Rates (`at_least`) get worse by falling, times by rising.
    share = 1 + percent / 100
    return value * share < before if row.at_least else value > before * share
