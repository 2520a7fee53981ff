"""A campaign on disk: one SQLite file a shard, in a folder that shards may share.

A batch is one transaction, so a campaign that is killed at any moment goes on without a case lost
or counted twice. One process writes: it holds SQLite's lock until it is done. A batch that runs
keeps what it met in a JSON file of its own, because workers do not write to the database; that file
stands in for the batch if its process is killed.

[Note: strangers' files]
A corpus may come from anybody. Before a query, the file must be a regular one of bounded size, in
rollback mode, with exactly our tables: no trigger, view or index of somebody else runs. Then every
value is checked. Files beside it count, too: SQLite would read a write-ahead log that contradicts
the database, and would delete any file that a rollback journal names as its super-journal.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from zero_sim.errors import UsageError
from zero_sim.fuzz.old_corpus import OLD_FILES, OLD_SUFFIX, read_file, read_old
from zero_sim.fuzz.records import BatchReport, Found, Head, batch_seed, from_json, to_json
from zero_sim.host.files import unwritten
from zero_sim.untrusted import printable

_FILES = "shard-{}-of-{}.sqlite"
_TABLES = (
    "CREATE TABLE campaign (head TEXT NOT NULL)",
    "CREATE TABLE batches (batch INTEGER NOT NULL, start INTEGER NOT NULL, cases INTEGER NOT NULL,"
    " report TEXT NOT NULL, PRIMARY KEY (batch, start))",
    "CREATE TABLE findings (finding TEXT NOT NULL UNIQUE)",
)
# Of two reports from one case on, the one that got further is kept, whichever came first.
_KEEP_REPORT = """
INSERT INTO batches VALUES (?, ?, ?, ?) ON CONFLICT (batch, start) DO UPDATE
SET cases = excluded.cases, report = excluded.report WHERE excluded.cases >= cases
"""
_HEAD_OF_OURS = (b"SQLite format 3\0", b"\1\1", b"\x0d")
"""What it is; rollback mode; and a page 1 without pages below it, which could repeat endlessly."""
_NAMES_SUPER_JOURNAL = bytes.fromhex("d9d505f920a163d7")
"""Last bytes of a rollback journal that has a super-journal; ours has none."""
_WITHOUT_LOCKS = (sqlite3.SQLITE_IOERR_RDLOCK, sqlite3.SQLITE_IOERR_LOCK)
"""Errors of a file system that has no locks."""
_ERROR_NUMBERS = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_IOERR: errno.EIO,
    sqlite3.SQLITE_NOMEM: errno.ENOMEM,
    sqlite3.SQLITE_CANTOPEN: errno.EACCES,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_PERM: errno.EPERM,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Content of the file of a shard."""

    head: Head
    reports: Sequence[BatchReport]
    """In the order of batches, without their findings."""
    found: Mapping[int, Found]
    """Findings in the order in which they came, by row of the file."""

    def counted(self) -> Iterator[tuple[BatchReport, bool]]:
        """Reports, and whether their cases count: each case once, from the first of its batch."""
        ran: dict[int, int] = {}
        for report in self.reports:
            counts = report.counts.cases > 0 and report.start == ran.get(report.index, 0)
            if counts:
                ran[report.index] = report.start + report.counts.cases
            yield report, counts


@dataclass(kw_only=True, slots=True)
class Corpus:
    """One shard's file, which nobody else has open; see `open_corpus`."""

    path: Path
    kept: Kept
    """Content when it was opened, without findings that are fixed since."""
    converted: Path | None
    """File of an earlier version that it was made from."""
    _database: sqlite3.Connection = field(repr=False)

    @property
    def folder(self) -> Path:
        """Where everything of the campaign lies."""
        return self.path.parent

    def unfinished(self, index: int) -> Path:
        """The file of a batch that runs."""
        return self.folder / f"unfinished-{index}.json"

    def append(self, report: BatchReport) -> None:
        """Keep a report and what it found.

        Raises:
            EnvironmentProblem: There is no room; the corpus is as it was.
            UsageError: It cannot be written.
        """
        with _transaction(self._database, self.path):
            _insert(self._database, [report], report.found)
        # One that stays is taken up again, and changes nothing.
        with contextlib.suppress(OSError):
            self.unfinished(report.index).unlink()

    def append_fixed(self, found: Found) -> None:
        """Forget a finding that is fixed; its bundle goes to the folder `fixed`.

        Batches that may have met it are to be run again, because the code has changed.

        Raises:
            EnvironmentProblem: There is no room.
            UsageError: It cannot be written.
        """
        gone = {row: one for row, one in self.kept.found.items() if one.is_of == found.is_of}
        again = [each for each in self.kept.reports if any(map(each.may_have_met, gone.values()))]
        # First: a process that is killed in between leaves the finding to be judged once more.
        self._set_aside(found.bundle)
        with _transaction(self._database, self.path):
            for row in gone:
                self._database.execute("DELETE FROM findings WHERE rowid = ?", (row,))
            for each in again:
                at = (each.index, each.start)
                self._database.execute("DELETE FROM batches WHERE batch = ? AND start = ?", at)
        self.kept = _read(self._database, path=self.path)

    def _set_aside(self, bundle: str) -> None:
        old, new = self.folder / "bundles" / bundle, self.folder / "fixed" / bundle
        # Another shard may have met the same.
        if not bundle or not old.exists():
            return
        try:
            new.parent.mkdir(exist_ok=True)
            shutil.rmtree(new, ignore_errors=True)
            old.rename(new)
        except OSError as error:
            raise unwritten("a corpus", self.folder, error) from None

    def read_unfinished(self, index: int) -> BatchReport | None:
        """What a batch met whose process is gone, if it met anything."""
        try:
            report = from_json(BatchReport, read_file(self.unfinished(index)))
        except ValueError:
            return None
        return replace(report, complete=False) if report.index == index else None

    def _take_up_unfinished(self) -> None:
        """Keep what batches of this shard met whose campaign was killed."""
        number, count = self.kept.head.shard
        for path in sorted(self.folder.glob("unfinished-*.json")):
            index = path.stem.rpartition("-")[2]
            if index.isdecimal() and int(index) % count == number - 1:
                # It is written again; that must not lead elsewhere.
                read_file(path)
                report = self.read_unfinished(int(index))
                if report is not None:
                    self.append(report)
        self.kept = _read(self._database, path=self.path)


@contextlib.contextmanager
def open_corpus(folder: Path, *, head: Head, parts: Sequence[Kept] = ()) -> Iterator[Corpus]:
    """Open the file of a shard, or begin one; other processes are kept from it.

    Args:
        folder: Where it lies.
        head: What its batches have in common.
        parts: What one that is begun has from the start; the file of an earlier version otherwise.

    Raises:
        UsageError: What is there is of another campaign, or no corpus; another process writes to
            it; or it cannot be read or written there.
        EnvironmentProblem: There is no room for it.
    """
    path, old = (folder / name.format(*head.shard) for name in (_FILES, OLD_FILES))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritten("a corpus", folder, error) from None
    converted = None
    with _connected(path, mode="rwc") as database:
        with _transaction(database, path):
            if not _tables_in(database):
                if not parts and os.path.lexists(old):
                    parts, converted = [read_corpus(old)], old
                    _require_same(parts[0].head, head, path=old)
                _create(database, head, parts)
        kept = _read(database, path=path)
        _require_same(kept.head, head, path=path)
        corpus = Corpus(path=path, kept=kept, converted=converted, _database=database)
        corpus._take_up_unfinished()
        yield corpus


def find_shards(folder: Path) -> list[Path]:
    """The files of shards in a folder, those of an earlier version only until one is converted."""
    # An empty file is what a process leaves that was killed before its first transaction ended.
    found = [path for path in folder.glob(_FILES.format("*", "*")) if path.lstat().st_size]
    for old in folder.glob(OLD_FILES.format("*", "*")):
        if folder / f"shard{old.stem.removeprefix('batches')}.sqlite" not in found:
            found.append(old)
    return sorted(found)


def read_corpus(path: Path) -> Kept:
    """Read the file of a shard, whatever its campaign and version; nothing is written.

    Raises:
        UsageError: It is no corpus, cannot be read, or a campaign writes to it.
    """
    if path.suffix == OLD_SUFFIX:
        head, reports = read_old(path)
        found = [one for report in reports for one in report.found]
        reports = [replace(report, found=()) for report in reports]
        return Kept(head=head, reports=reports, found=dict(enumerate(found)))
    with _connected(path, mode="ro") as database:
        return _read(database, path=path)


def _require_same(found: Head, expected: Head, *, path: Path) -> None:
    if found != expected:
        raise UsageError(
            f"expected a corpus of {to_json(expected)} in {path}, got {printable(to_json(found))}. "
            "Try another --corpus, or the seed, target, device, options and family that it was "
            "begun with, and the order."
        )


def _require_files_ours(path: Path) -> None:
    """Refuse a file that SQLite would read otherwise than we wrote it; see the note above.

    Raises:
        UsageError: One that is there is not ours.
    """
    journal, log = (path.with_name(path.name + ending) for ending in ("-journal", "-wal"))
    wrong = f"{log} beside it" if os.path.lexists(log) else ""
    data = read_file(path) if os.path.lexists(path) else b""
    if data and (data[:16], data[18:20], data[100:101]) != _HEAD_OF_OURS:
        wrong = "another file"
    if os.path.lexists(journal) and read_file(journal).endswith(_NAMES_SUPER_JOURNAL):
        wrong = f"{journal} beside it, which names another file"
    if wrong:
        raise UsageError(f"expected a corpus in {path}, got {wrong}. Try another --corpus.")


@contextlib.contextmanager
def _connected(path: Path, *, mode: str) -> Iterator[sqlite3.Connection]:
    """A connection to a file of a corpus, checked as far as a file can be; see `_read`.

    Raises:
        UsageError: It is not ours, or another process has it open.
        EnvironmentProblem: The disk fails.
    """
    _require_files_ours(path)
    url = f"{path.absolute().as_uri()}?mode={mode}"
    with _errors_told(path):
        try:
            database = _locked(url)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode not in _WITHOUT_LOCKS:
                raise
            # That no other process writes is up to the user there.
            database = _locked(f"{url}&nolock=1")
        with contextlib.closing(database):
            yield database


def _locked(url: str) -> sqlite3.Connection:
    """A connection that keeps its locks from the first query or write on until it is closed."""
    database = sqlite3.connect(url, uri=True, timeout=0, isolation_level=None)
    try:
        for pragma in ("trusted_schema = OFF", "cell_size_check = ON", "locking_mode = EXCLUSIVE"):
            database.execute(f"PRAGMA {pragma}")
        _tables_in(database)
    except BaseException:
        database.close()
        raise
    return database


@contextlib.contextmanager
def _transaction(database: sqlite3.Connection, path: Path) -> Iterator[None]:
    with _errors_told(path):
        database.execute("BEGIN IMMEDIATE")
        with database:
            yield


@contextlib.contextmanager
def _errors_told(path: Path) -> Iterator[None]:
    """Errors of SQLite as ours."""
    try:
        yield
    except sqlite3.Error as error:
        # The low byte has the kind of an error.
        code = getattr(error, "sqlite_errorcode", 0)
        if code & 0xFF == sqlite3.SQLITE_BUSY:
            raise UsageError(
                f"expected a corpus that no other campaign adds to, got {path}, which one does "
                "now. Wait for its end, or try another --corpus, or a --shard of its own for each."
            ) from None
        number = _ERROR_NUMBERS.get(code & 0xFF)
        if code == sqlite3.SQLITE_READONLY_ROLLBACK:
            got = "a write that was cut short; go on with its campaign to end it"
        elif number is not None:
            raise unwritten("a corpus", path, OSError(number, str(error))) from None
        else:
            got = printable(str(error))
        raise UsageError(f"expected a corpus in {path}, got {got}. Try another --corpus.") from None


def _create(database: sqlite3.Connection, head: Head, parts: Iterable[Kept]) -> None:
    for table in _TABLES:
        database.execute(table)
    database.execute("INSERT INTO campaign VALUES (?)", (to_json(head),))
    for part in parts:
        _insert(database, part.reports, part.found.values())


def _insert(
    database: sqlite3.Connection, reports: Iterable[BatchReport], found: Iterable[Found]
) -> None:
    for each in reports:
        row = (each.index, each.start, each.counts.cases, to_json(replace(each, found=())))
        database.execute(_KEEP_REPORT, row)
    for one in found:
        database.execute("INSERT OR IGNORE INTO findings VALUES (?)", (to_json(one),))


def _tables_in(database: sqlite3.Connection) -> set[str | None]:
    """How tables and all else were made; None for the indices of our keys."""
    return {sql for (sql,) in database.execute("SELECT sql FROM sqlite_master")}


def _read(database: sqlite3.Connection, *, path: Path) -> Kept:
    """All that a file holds, every value checked.

    Raises:
        UsageError: It is not a corpus, or was changed by somebody else.
    """
    where, reports, found = "", [], {}
    with _errors_told(path):
        try:
            if _tables_in(database) != {*_TABLES, None}:
                raise ValueError("other tables")
            # Otherwise pages that refer to each other could give rows without end.
            ((state,),) = database.execute("PRAGMA quick_check(1)")
            if state != "ok":
                raise ValueError(state)
            where = ", its head"
            ((text,),) = database.execute("SELECT head FROM campaign LIMIT 2")
            head = from_json(Head, text)
            for *row, text in database.execute("SELECT * FROM batches ORDER BY batch, start"):
                where = ", batch {} from case {}".format(*row)
                report = from_json(BatchReport, text)
                if report.seed != batch_seed(head.seed, report.index):
                    raise ValueError(f"a batch of another seed than {head.seed}")
                if row != [report.index, report.start, report.counts.cases]:
                    raise ValueError("a report of another batch")
                reports.append(report)
            for row, text in database.execute("SELECT rowid, finding FROM findings ORDER BY rowid"):
                where = f", finding {row}"
                found[row] = from_json(Found, text)
        except ValueError as error:
            raise UsageError(
                f"{path}{printable(where)}: expected a corpus of a campaign, got "
                f"{printable(str(error))}. Try another --corpus."
            ) from None
    return Kept(head=head, reports=reports, found=found)
