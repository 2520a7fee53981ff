"""Corpora of earlier versions, read only: a head line, then a JSON line per batch.

An incomplete batch continues in another line. If a crash cut a line short, it is dropped, and its
cases run again. A line may also declare a finding fixed. Earlier batches that met this finding do
not count, because the code has changed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from zero_sim.errors import UsageError
from zero_sim.fuzz.records import BatchReport, Counts, Head, batch_seed, from_json
from zero_sim.untrusted import Unreadable, printable, read_regular

OLD_SUFFIX = ".jsonl"
OLD_FILES = "batches-{}-of-{}" + OLD_SUFFIX
# Campaigns do not write larger files.
_FILE_BYTES_MAX = 1 << 30
_COUNTS = {each.name for each in fields(Counts)}


def read_old(path: Path) -> tuple[Head, tuple[BatchReport, ...]]:
    """Read a shard's file.

    Raises:
        UsageError: The file is no corpus or cannot be read.
    """
    first, *lines = read_file(path).splitlines() or [b""]
    try:
        head = _head(json.loads(first))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        got = printable(first[:200].decode(errors="replace"))
        raise UsageError(
            f"expected {path} to begin with the head of a corpus, got {got!r}. Try another folder."
        ) from None
    reports: list[BatchReport] = []
    for number, line in enumerate(lines, 2):
        try:
            value = json.loads(line)
            if "fixed" in value:
                reports = _without(reports, tuple(value["fixed"]))
            else:
                reports.append(_report(value, seed=head.seed))
        except (json.JSONDecodeError, UnicodeDecodeError):
            continue  # A crash cut the line short.
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise UsageError(
                f"{path.name} line {number}: expected a batch of this campaign, got other JSON "
                f"({error}). Delete the line to run its cases again."
            ) from None
    return head, tuple(reports)


def read_file(path: Path) -> bytes:
    """Return the content of a corpus file.

    Raises:
        UsageError: The file is not regular or cannot be read.
    """
    # A symlink in a stranger's corpus could reveal other files.
    try:
        return read_regular(path, bytes_max=_FILE_BYTES_MAX, follow=False)
    except Unreadable as reason:
        raise UsageError(
            f"expected to read {path}, a file of a corpus, got: {reason}. Try another --corpus."
        ) from None


def _head(data: dict[str, Any]) -> Head:
    # Only the first version had these fields.
    if (data.pop("format"), data.pop("version")) != ("zero_sim corpus", 1):
        raise ValueError("no head of a corpus")
    data["options"] = sorted(data.get("options", {}).items())
    if not set(data) <= {each.name for each in fields(Head)}:
        raise ValueError("a head of another version")
    return from_json(Head, json.dumps(data))


def _report(data: dict[str, Any], *, seed: int) -> BatchReport:
    """Return the report in a line, where counts are at the top level."""
    counts = {name: data.pop(name) for name in _COUNTS & set(data)}
    report = from_json(BatchReport, json.dumps({**data, "counts": counts}))
    if report.seed != batch_seed(seed, report.index):
        raise ValueError(f"expected a batch of seed {seed}, got one of another")
    return report


def _without(reports: Sequence[BatchReport], is_of: tuple[object, ...]) -> list[BatchReport]:
    """Return reports without a finding and without the cases of batches that may have met it."""
    gone = [one for report in reports for one in report.found if one.is_of == is_of]

    def without(report: BatchReport) -> BatchReport:
        found = tuple(one for one in report.found if one.is_of != is_of)
        if not any(map(report.may_have_met, gone)):
            return replace(report, found=found)
        return replace(report, found=found, counts=Counts(), cases_with={}, complete=False)

    return [without(report) for report in reports]
