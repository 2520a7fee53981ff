"""A campaign on disk: a head line, then one line of JSON a batch, so that it can be resumed.

Shards of one campaign share a folder and write a file each, which nobody else has open then. A
batch that was cut short goes on in a line of its own. A line that a crash cut short is dropped, and
its cases are run again. A line may also say that a finding is fixed: it is gone then, and the
batches that met it are to be run again, since the code has changed.

A batch that runs keeps what it met in a file of its own, which stands in for its line where its
process is killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self

from zero_sim.errors import UsageError
from zero_sim.fuzz.records import BatchReport, Found, batch_seed
from zero_sim.host.files import unwritten, write_whole
from zero_sim.untrusted import (
    NESTING_MAX,
    Unreadable,
    nests_too_deep,
    open_regular,
    printable,
    read_regular,
)

FORMAT = "zero_sim corpus"
VERSION = 1
FILE_BYTES_MAX = 1 << 30
"""What is larger was not written by us."""
SHARDS_MAX = 1_000_000
"""Shards of a campaign, so that a stranger's corpus cannot make a reader list more of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """What batches of one corpus have in common."""

    seed: int
    target: str
    cases: int
    """Cases of a batch."""
    shard: tuple[int, int]
    """Which shard of how many, counted from 1."""
    device: str = "cpu"
    """Where ranks and reference compute."""
    options: tuple[tuple[str, str], ...] = ()
    """Options of the target's own that all cases have."""
    family: int = 1
    """Most members of a family."""

    def as_dict(self) -> dict[str, object]:
        """Everything, ready for JSON; the CPU, no options and no families go without saying."""
        on: dict[str, object] = {} if self.device == "cpu" else {"device": self.device}
        if self.options:
            on["options"] = dict(self.options)
        if self.family != 1:
            on["family"] = self.family
        return {
            "format": FORMAT,
            "version": VERSION,
            "seed": self.seed,
            "target": self.target,
            "cases": self.cases,
            "shard": list(self.shard),
            **on,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Head:
        """What `as_dict` gave.

        Raises:
            ValueError: It gave something else.
        """
        head = cls(
            seed=int(data["seed"]),
            target=str(data["target"]),
            cases=int(data["cases"]),
            shard=(int(data["shard"][0]), int(data["shard"][1])),
            device=str(data.get("device", "cpu")),
            options=tuple(sorted(dict(data.get("options", {})).items())),
            family=int(data.get("family", 1)),
        )
        number, count = head.shard
        if head.as_dict() != data or not 1 <= number <= count <= SHARDS_MAX:
            raise ValueError("no head of a corpus")
        return head


@dataclass(slots=True)
class Corpus:
    """One shard's file; opened by `open_corpus`."""

    path: Path
    head: Head
    reports: list[BatchReport] = field(default_factory=list)
    """Those that were there when it was opened."""
    _lock: BinaryIO | None = None
    """The file, held open while nobody else is to add to it."""

    def __enter__(self) -> Self:
        """Keep others from adding to it, as far as they ask.

        Raises:
            UsageError: Another campaign adds to it.
            OSError: It is gone.
        """
        self._lock = open_regular(self.path, follow=False)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.__exit__()
            raise UsageError(
                f"expected a corpus that no other campaign adds to, got {self.path}, which one "
                "does now. Try another --corpus, or a --shard of its own for each."
            ) from None
        except OSError:
            pass  # Not every file system has locks; what was run twice counts once.
        return self

    def __exit__(self, *exception: object) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def folder(self) -> Path:
        """Where everything of the campaign lies."""
        return self.path.parent

    def unfinished(self, index: int) -> Path:
        """The file of a batch that runs."""
        return self.folder / f"unfinished-{index}.json"

    def append(self, report: BatchReport) -> None:
        """Keep a report.

        Raises:
            OSError: It cannot be written; the file is as it was.
        """
        self._append(report.as_dict())
        self.unfinished(report.index).unlink(missing_ok=True)

    def append_fixed(self, found: Found) -> None:
        """Keep that a finding is fixed; its bundle goes to the folder `fixed`.

        Raises:
            OSError: It cannot be written; the file is as it was.
        """
        self._append({"fixed": list(found.is_of)})
        self.reports = _without(self.reports, found.is_of)
        if not found.bundle:
            return
        old, new = self.folder / "bundles" / found.bundle, self.folder / "fixed" / found.bundle
        new.parent.mkdir(exist_ok=True)
        shutil.rmtree(new, ignore_errors=True)
        # Another shard may have met the same.
        with contextlib.suppress(FileNotFoundError):
            old.rename(new)

    def read_unfinished(self, index: int) -> BatchReport | None:
        """What a batch met whose process is gone, if it met anything."""
        path = self.unfinished(index)
        try:
            report = BatchReport.from_dict(_parse(_read_file(path), where=path.name))
        except (UsageError, ValueError, TypeError, KeyError):
            return None
        return dataclasses.replace(report, complete=False)

    def _append(self, line: dict[str, object]) -> None:
        _add(self.path, (json.dumps(line, separators=(",", ":")) + "\n").encode())


def open_corpus(folder: Path, *, head: Head) -> Corpus:
    """Open the file of a shard, or begin one.

    Raises:
        UsageError: What is there is of another campaign, or no corpus; or it cannot be read or
            written there.
        EnvironmentProblem: There is no room for it.
    """
    try:
        return _open(folder, head=head)
    except OSError as error:
        raise unwritten("a corpus", folder, error) from None


def read_corpus(path: Path) -> Corpus:
    """Read the file of a shard, whatever its campaign; nothing is written.

    Raises:
        UsageError: It is no corpus, or cannot be read.
    """
    first, *lines = _read_file(path).splitlines() or [b""]
    try:
        head = Head.from_dict(_parse(first, where=f"{path.name} line 1"))
    except UsageError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        got = printable(first[:200].decode(errors="replace"))
        raise UsageError(
            f"expected {path} to begin with the head of a corpus, got {got!r}. Try another folder."
        ) from None
    return Corpus(path, head, _read(lines, where=path.name, seed=head.seed))


def _open(folder: Path, *, head: Head) -> Corpus:
    folder.mkdir(parents=True, exist_ok=True)
    number, count = head.shard
    corpus = Corpus(folder / f"batches-{number}-of-{count}.jsonl", head)
    path, expected = corpus.path, json.dumps(head.as_dict())
    # A link that leads to nothing is there, too.
    data = _read_file(path) if os.path.lexists(path) else b""
    if not data:
        write_whole(path, f"{expected}\n".encode())
        return corpus
    first, *lines = data.splitlines()
    if first != expected.encode():
        got = printable(first[:200].decode(errors="replace"))
        raise UsageError(
            f"expected a corpus of {expected} in {path}, got {got}. Try another --corpus, or the "
            "seed, target, device, options and family that it was begun with."
        )
    corpus.reports = _read(lines, where=path.name, seed=head.seed)
    if not data.endswith(b"\n"):
        _add(path, b"\n")
    for left in sorted(folder.glob("unfinished-*.json")):
        index = left.stem.rpartition("-")[2]
        if index.isdecimal() and int(index) % count == number - 1:
            # It is written again; that must not lead elsewhere.
            _read_file(left)
            report = corpus.read_unfinished(int(index))
            if report is not None:
                corpus.append(report)
                corpus.reports.append(report)
    return corpus


def _read(lines: Iterable[bytes], *, where: str, seed: int) -> list[BatchReport]:
    """The reports of a file's lines behind its head.

    Raises:
        UsageError: A line is no report of this campaign.
    """
    reports: list[BatchReport] = []
    for number, line in enumerate(lines, 2):
        at = f"{where} line {number}"
        try:
            data = _parse(line, where=at)
        except UsageError:
            raise
        except ValueError:
            continue  # A crash cut it short.
        try:
            if "fixed" in data:
                reports = _without(reports, tuple(data["fixed"]))
                continue
            report = BatchReport.from_dict(data)
            if report.seed != batch_seed(seed, report.index):
                raise ValueError(f"expected a batch of seed {seed}, got one of another")
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(
                f"{at}: expected a batch of this campaign, got another JSON ({error}). Try to "
                "delete the line, and its cases are run again."
            ) from None
        reports.append(report)
    return reports


def _read_file(path: Path) -> bytes:
    """The content of a file of a corpus; a link could show what lies elsewhere on the machine.

    Raises:
        UsageError: It is no regular file, or cannot be read.
    """
    try:
        return read_regular(path, bytes_max=FILE_BYTES_MAX, follow=False)
    except Unreadable as reason:
        raise UsageError(
            f"expected to read {path}, a file of a corpus, got: {reason}. Try another --corpus."
        ) from None


def _parse(data: bytes, *, where: str) -> Any:
    """JSON of a corpus.

    Raises:
        ValueError: It is none.
        UsageError: It nests deeper than anything that was written here.
    """
    value: Any = None
    try:
        value = json.loads(data)
        is_deep = nests_too_deep(value)
    except RecursionError:
        is_deep = True
    if is_deep:
        raise UsageError(
            f"{where}: expected a batch of a corpus, got more than {NESTING_MAX} levels of JSON. "
            "Try another --corpus."
        )
    return value


def _add(path: Path, data: bytes) -> None:
    """Add to a file, all or nothing.

    Raises:
        OSError: It cannot be written, or is no regular file any more.
    """
    try:
        file = open_regular(path, follow=False, append=True)
    except Unreadable as reason:
        raise OSError(errno.EINVAL, str(reason), str(path)) from None
    with file:
        start = file.seek(0, os.SEEK_END)
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            file.truncate(start)
            raise


def counted(reports: Iterable[BatchReport]) -> Iterator[tuple[BatchReport, bool]]:
    """Reports, and whether their cases count: each case once, from the first of its batch on.

    Args:
        reports: In the order in which they were kept.
    """
    ran: dict[int, int] = {}
    for report in reports:
        counts = report.cases > 0 and report.start == ran.get(report.index, 0)
        if counts:
            ran[report.index] = report.start + report.cases
        yield report, counts


def _without(reports: Sequence[BatchReport], is_of: tuple[object, ...]) -> list[BatchReport]:
    """Reports without a finding; of one that may have met it no case counts any more."""
    gone = [one for report in reports for one in report.found if one.is_of == is_of]

    def without(report: BatchReport) -> BatchReport:
        found = tuple(one for one in report.found if one.is_of != is_of)
        left = dataclasses.replace(report, found=found)
        if not any(one.is_met_by(key) for one in gone for key in report.keys):
            return left
        return dataclasses.replace(
            left,
            cases=0,
            verdicts={},
            params_only=0,
            cases_with={},
            keys={},
            unproved={},
            unobserved={},
            complete=False,
        )

    return [without(report) for report in reports]
