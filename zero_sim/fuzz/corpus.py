"""Campaigns on disk: a SQLite file per shard, in a folder that shards may share.

Each batch is a transaction. So a campaign can be killed at any moment, and resumes without losing a
case or counting it twice. A single process writes, and holds SQLite's lock until it ends. Workers
do not write to the database. A running batch saves its findings in a JSON file, which replaces its
report if the process is killed.

[Note: strangers' files]
A corpus may come from a stranger. Before any query, the file must be a regular file of bounded
size, in rollback mode, with exactly our tables, so that no foreign trigger, view or index runs.
Then every value is checked. Files beside it are checked too: SQLite would read a write-ahead log
that contradicts the database, and would delete any file that a rollback journal names as its
super-journal.
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
# If two reports start at the same case, keep the report with more cases.
_KEEP_REPORT = """
INSERT INTO batches VALUES (?, ?, ?, ?) ON CONFLICT (batch, start) DO UPDATE
SET cases = excluded.cases, report = excluded.report WHERE excluded.cases >= cases
"""
# Magic bytes, rollback mode, and a page 1 without child pages, because these could form a cycle.
_HEAD_OF_OURS = (b"SQLite format 3\0", b"\1\1", b"\x0d")
# Last bytes of a rollback journal that names a super-journal. Ours never do.
_NAMES_SUPER_JOURNAL = bytes.fromhex("d9d505f920a163d7")
# Errors on a file system without locks.
_WITHOUT_LOCKS = (sqlite3.SQLITE_IOERR_RDLOCK, sqlite3.SQLITE_IOERR_LOCK)
# SQLite's primary codes as errno, so that messages are the same as for other files.
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
    """Content of a shard's file."""

    head: Head
    reports: Sequence[BatchReport]
    """Reports in order of batches, without findings."""
    found: Mapping[int, Found]
    """Findings by row in the file, in order of discovery."""

    def counted(self) -> Iterator[tuple[BatchReport, bool]]:
        """Yield reports, each with True if its cases count. Each case counts once."""
        # A report counts if it starts at the end of the batch's previous counted report.
        ran: dict[int, int] = {}
        for report in self.reports:
            counts = report.counts.cases > 0 and report.start == ran.get(report.index, 0)
            if counts:
                ran[report.index] = report.start + report.counts.cases
            yield report, counts


@dataclass(kw_only=True, slots=True)
class Corpus:
    """A shard's file, locked by this process; see `open_corpus`."""

    path: Path
    kept: Kept
    """Content when the file was opened, without findings fixed since then."""
    converted: Path | None
    """File of an earlier version that was converted; None if there was no such file."""
    _database: sqlite3.Connection = field(repr=False)

    @property
    def folder(self) -> Path:
        """The campaign's folder."""
        return self.path.parent

    def unfinished(self, index: int) -> Path:
        """Return the path of a running batch's file."""
        return self.folder / f"unfinished-{index}.json"

    def append(self, report: BatchReport) -> None:
        """Save a report and its findings.

        Raises:
            EnvironmentProblem: The disk is full; the corpus is unchanged.
            UsageError: The corpus cannot be written.
        """
        with _transaction(self._database, self.path):
            _insert(self._database, [report], report.found)
        # If the file stays, the next start loads it again, without effect.
        with contextlib.suppress(OSError):
            self.unfinished(report.index).unlink()

    def append_fixed(self, found: Found) -> None:
        """Remove a fixed finding, and move its bundle to the `fixed` folder.

        Reports of batches that may have met it are removed too, so that these batches run again
        with the changed code.

        Raises:
            EnvironmentProblem: The disk is full.
            UsageError: The corpus cannot be written.
        """
        gone = {row: one for row, one in self.kept.found.items() if one.is_of == found.is_of}
        again = [each for each in self.kept.reports if any(map(each.may_have_met, gone.values()))]
        # The bundle first: if the process is killed in between, the finding is judged again.
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
        # Another shard in this folder may have moved the bundle.
        if not bundle or not old.exists():
            return
        try:
            new.parent.mkdir(exist_ok=True)
            # If the finding was fixed before and came back, there is an older bundle, which
            # `rename` would not replace.
            shutil.rmtree(new, ignore_errors=True)
            old.rename(new)
        except OSError as error:
            raise unwritten("a corpus", self.folder, error) from None

    def read_unfinished(self, index: int) -> BatchReport | None:
        """Return the findings of a batch whose process died; None if it saved no findings."""
        try:
            report = from_json(BatchReport, read_file(self.unfinished(index)))
        except ValueError:
            return None
        # The file was written at the last finding, so later cases may be missing.
        return replace(report, complete=False) if report.index == index else None

    def _take_up_unfinished(self) -> None:
        """Save findings of this shard's batches that were running when the campaign was killed."""
        number, count = self.kept.head.shard
        for path in sorted(self.folder.glob("unfinished-*.json")):
            index = path.stem.rpartition("-")[2]
            # Skip batches of other shards: they may be running.
            if index.isdecimal() and int(index) % count == number - 1:
                # The batch will write to this file, so refuse a symlink now.
                read_file(path)
                report = self.read_unfinished(int(index))
                if report is not None:
                    self.append(report)
        self.kept = _read(self._database, path=self.path)


@contextlib.contextmanager
def open_corpus(folder: Path, *, head: Head, parts: Sequence[Kept] = ()) -> Iterator[Corpus]:
    """Open or create a shard's file, and lock it.

    Args:
        folder: The campaign's folder.
        head: Settings that all batches share.
        parts: Initial content of a new file. If empty, an earlier version's file, if any.

    Raises:
        UsageError: The file is no corpus, belongs to another campaign, is in use, or cannot be read
            or written.
        EnvironmentProblem: The disk is full.
    """
    path, old = (folder / name.format(*head.shard) for name in (_FILES, OLD_FILES))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritten("a corpus", folder, error) from None
    converted = None
    with _connected(path, mode="rwc") as database:
        # A single transaction, so that a process killed here leaves an empty file, not half a
        # corpus.
        with _transaction(database, path):
            if not _tables_in(database):
                if not parts and os.path.lexists(old):
                    parts, converted = [read_corpus(old)], old
                    # Within the transaction, so that nothing is converted if the campaign is
                    # another.
                    _require_same(parts[0].head, head, path=old)
                _create(database, head, parts)
        kept = _read(database, path=path)
        _require_same(kept.head, head, path=path)
        corpus = Corpus(path=path, kept=kept, converted=converted, _database=database)
        corpus._take_up_unfinished()
        yield corpus


def find_shards(folder: Path) -> list[Path]:
    """Return the shard files in a folder, with files of an earlier version not converted yet."""
    # Skip empty files, which a process leaves if it is killed in its first transaction.
    found = [path for path in folder.glob(_FILES.format("*", "*")) if path.lstat().st_size]
    for old in folder.glob(OLD_FILES.format("*", "*")):
        if folder / f"shard{old.stem.removeprefix('batches')}.sqlite" not in found:
            found.append(old)
    return sorted(found)


def read_corpus(path: Path) -> Kept:
    """Read the shard file of any campaign and version, without writing.

    Raises:
        UsageError: The file is no corpus, cannot be read, or is in use.
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
            "Try another --corpus, or its original seed, target, device, options, family and "
            "order."
        )


def _require_files_ours(path: Path) -> None:
    """Refuse files that would make SQLite read other content; see [Note: strangers' files].

    Raises:
        UsageError: zero_sim did not write one of the files.
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
    """Open a connection to a corpus, after file checks. `_read` checks the content.

    Raises:
        UsageError: zero_sim did not write the file, or another process uses it.
        EnvironmentProblem: The disk fails.
    """
    # Check before SQLite opens any file.
    _require_files_ours(path)
    url = f"{path.absolute().as_uri()}?mode={mode}"
    with _explained_errors(path):
        try:
            database = _locked(url)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode not in _WITHOUT_LOCKS:
                raise
            # If the file system has no locks, the user must keep other processes away.
            database = _locked(f"{url}&nolock=1")
        with contextlib.closing(database):
            yield database


def _locked(url: str) -> sqlite3.Connection:
    """Open a connection that holds its locks until it is closed."""
    # trusted_schema = OFF and cell_size_check = ON, because the file may be forged. timeout=0 does
    # not wait for another process. isolation_level=None leaves transactions to us.
    database = sqlite3.connect(url, uri=True, timeout=0, isolation_level=None)
    try:
        # The query below takes the lock, and EXCLUSIVE keeps it.
        for pragma in ("trusted_schema = OFF", "cell_size_check = ON", "locking_mode = EXCLUSIVE"):
            database.execute(f"PRAGMA {pragma}")
        _tables_in(database)
    except BaseException:
        database.close()
        raise
    return database


@contextlib.contextmanager
def _transaction(database: sqlite3.Connection, path: Path) -> Iterator[None]:
    with _explained_errors(path):
        # IMMEDIATE takes the write lock now, not at the first change.
        database.execute("BEGIN IMMEDIATE")
        with database:
            yield


@contextlib.contextmanager
def _explained_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        # The low byte of an extended error code is the primary code.
        code = getattr(error, "sqlite_errorcode", 0)
        if code & 0xFF == sqlite3.SQLITE_BUSY:
            raise UsageError(
                f"expected a corpus that no other campaign uses, got {path}, which is in use. Wait "
                "for its end, or use another --corpus, or a --shard of its own for each."
            ) from None
        number = _ERROR_NUMBERS.get(code & 0xFF)
        if code == sqlite3.SQLITE_READONLY_ROLLBACK:
            got = "an incomplete write; resume its campaign to complete it"
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
        # Several batches may have an equal finding, which gets a single row.
        database.execute("INSERT OR IGNORE INTO findings VALUES (?)", (to_json(one),))


def _tables_in(database: sqlite3.Connection) -> set[str | None]:
    """Return the SQL of everything in the schema; None for the indices of our keys."""
    return {sql for (sql,) in database.execute("SELECT sql FROM sqlite_master")}


def _read(database: sqlite3.Connection, *, path: Path) -> Kept:
    """Check and return a file's content.

    Raises:
        UsageError: The file is no corpus, or other software changed it.
    """
    where, reports, found = "", [], {}
    with _explained_errors(path):
        try:
            if _tables_in(database) != {*_TABLES, None}:
                raise ValueError("other tables")
            # Forged pages may refer to each other, and would yield rows without end.
            ((state,),) = database.execute("PRAGMA quick_check(1)")
            if state != "ok":
                raise ValueError(state)
            where = ", its head"
            # LIMIT 2, so that unpacking refuses a second head as well as a missing head.
            ((text,),) = database.execute("SELECT head FROM campaign LIMIT 2")
            head = from_json(Head, text)
            for *row, text in database.execute("SELECT * FROM batches ORDER BY batch, start"):
                where = ", batch {} from case {}".format(*row)
                report = from_json(BatchReport, text)
                # zero_sim writes no row that contradicts the head or its own columns.
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
