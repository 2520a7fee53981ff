"""A campaign on disk: a head line, then one line of JSON a batch, so that it can be resumed.

Shards of one campaign share a folder and write a file each. A line that a crash cut short is
dropped, and its batch is run again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zero_sim.errors import UsageError
from zero_sim.fuzz.records import BatchReport

FORMAT = "zero_sim corpus"
VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """What batches of one corpus have in common."""

    seed: int
    target: str
    cases: int
    """Cases of a batch."""
    shard: tuple[int, int]
    """Which shard of how many, counted from 1."""

    def as_dict(self) -> dict[str, object]:
        """Everything, ready for JSON."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "seed": self.seed,
            "target": self.target,
            "cases": self.cases,
            "shard": list(self.shard),
        }


@dataclass(slots=True)
class Corpus:
    """One shard's file; opened by `open_corpus`."""

    path: Path
    head: Head
    reports: list[BatchReport] = field(default_factory=list)
    """Those that were there when it was opened."""

    def append(self, report: BatchReport) -> None:
        """Keep a report.

        Raises:
            OSError: It cannot be written.
        """
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(report.as_dict(), separators=(",", ":")) + "\n")


def open_corpus(folder: Path, *, head: Head) -> Corpus:
    """Open the file of a shard, or begin one.

    Raises:
        UsageError: What is there is of another campaign, or no corpus.
        OSError: It cannot be read or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"batches-{head.shard[0]}-of-{head.shard[1]}.jsonl"
    expected = json.dumps(head.as_dict())
    if not path.exists() or not path.read_bytes():
        path.write_text(expected + "\n", encoding="utf-8")
        return Corpus(path, head)
    text = path.read_text(encoding="utf-8", errors="replace")
    first, *lines = text.splitlines()
    if first != expected:
        raise UsageError(
            f"expected a corpus of {expected} in {path}, got {first[:200]}. Try another --corpus, "
            "or the seed and target that it was begun with."
        )
    reports = list(_reports(lines))
    if not text.endswith("\n"):
        with path.open("a", encoding="utf-8") as file:
            file.write("\n")
    return Corpus(path, head, reports)


def _reports(lines: list[str]) -> Iterator[BatchReport]:
    for line in lines:
        data: Any = None
        try:
            data = json.loads(line)
            yield BatchReport.from_dict(data)
        except (ValueError, TypeError, KeyError):
            continue
