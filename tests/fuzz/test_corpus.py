"""Corpora: stored values are read back; foreign files are refused, never followed and never run."""

import resource
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest

from tests.fuzz.corpus_reports import HEAD, found, report_of
from tests.odd_files import make_odd
from zero_sim.errors import EnvironmentProblem, UsageError
from zero_sim.fuzz import corpus as corpus_module
from zero_sim.fuzz import old_corpus
from zero_sim.fuzz.corpus import open_corpus, read_corpus
from zero_sim.fuzz.records import to_json

ODD = ("fifo", "folder", "loop", "dangling", "device", "socket")


@pytest.fixture
def path(tmp_path):
    """File of a corpus with one batch and one finding."""
    with open_corpus(tmp_path / "corpus", head=HEAD) as corpus:
        corpus.append(report_of(0, found=(found("a"),)))
    return corpus.path


def reopen(path):
    with open_corpus(path.parent, head=HEAD):
        pass


def change(path, *statements, values=()):
    """Change a file as a stranger could."""
    with closing(sqlite3.connect(path)) as database, database:
        for statement in statements:
            database.execute(statement, values)


def refused(path, words):
    """Expect a refusal by both entry points."""
    for way in (reopen, read_corpus):
        with pytest.raises(UsageError, match=words) as caught:
            way(path)
        assert str(caught.value).isprintable()


def test_stored_values_are_read_back(path):
    kept = read_corpus(path)
    assert kept.head == HEAD
    assert [*kept.reports] == [report_of(0)]
    assert [*kept.found.values()] == [found("a")]


def test_longer_of_two_reports_from_one_case_on_is_kept(path):
    """The order and repetitions do not matter."""
    with open_corpus(path.parent, head=HEAD) as corpus:
        for cases in (10, 0, 10):
            corpus.append(report_of(0, cases=cases, complete=False))
        for cases in (0, 10, 0):
            corpus.append(report_of(1, cases=cases, complete=False))
    assert [each.counts.cases for each in read_corpus(path).reports] == [50, 10]


def test_corpus_of_another_seed_is_refused(path):
    other = replace(HEAD, seed=1)
    with (
        pytest.raises(UsageError, match="Try another --corpus, or its original seed"),
        open_corpus(path.parent, head=other),
    ):
        pass


def test_open_corpus_is_locked(path):
    with open_corpus(path.parent, head=HEAD):
        refused(path, "that no other campaign uses")


def test_incomplete_write_is_rolled_back_only_by_its_campaign(path, tmp_path):
    killed = tmp_path / "killed" / path.name
    killed.parent.mkdir()
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("PRAGMA cache_size = 1")
        database.execute("BEGIN")
        for index in range(1, 50):
            values = (index, 0, 50, to_json(report_of(index)))
            database.execute("INSERT INTO batches VALUES (?, ?, ?, ?)", values)
        # Pages that exceed the cache are written before the transaction ends.
        for name in (path.name, f"{path.name}-journal"):
            shutil.copy(path.with_name(name), killed.with_name(name))
        database.execute("ROLLBACK")
    assert killed.stat().st_size > path.stat().st_size
    with pytest.raises(UsageError, match="got an incomplete write; resume its campaign"):
        read_corpus(killed)
    reopen(killed)
    assert read_corpus(killed) == read_corpus(path)


def test_file_system_without_locks_is_accepted(path, monkeypatch):
    class Unlocked(sqlite3.Connection):
        def execute(self, sql, *values):
            if "sqlite_master" in sql and not is_without_locks:
                error = sqlite3.OperationalError("disk I/O error")
                error.sqlite_errorcode = sqlite3.SQLITE_IOERR_RDLOCK
                raise error
            return super().execute(sql, *values)

    def connect(url, **options):
        nonlocal is_without_locks
        is_without_locks = url.endswith("nolock=1") or url == ":memory:"
        return right(url, factory=Unlocked, **options)

    right, is_without_locks = sqlite3.connect, False
    monkeypatch.setattr(corpus_module.sqlite3, "connect", connect)
    with open_corpus(path.parent, head=HEAD) as corpus:
        corpus.append(report_of(1))
    assert len(read_corpus(path).reports) == 2


class TestNoRoom:
    def test_write_without_room_is_rolled_back(self, path):
        before = read_corpus(path)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        with open_corpus(path.parent, head=HEAD) as corpus:
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, hard))
            try:
                with pytest.raises(EnvironmentProblem, match="Try a place with room"):
                    corpus.append(report_of(1, found=(found("b", text="long" * 10_000),)))
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert read_corpus(path) == before

    def test_folder_that_cannot_be_created_is_a_usage_error(self, tmp_path):
        (tmp_path / "file").touch()
        with (
            pytest.raises(UsageError, match="expected to write a corpus to"),
            open_corpus(tmp_path / "file" / "below", head=HEAD),
        ):
            pass


class TestFilesOfOthers:
    @pytest.mark.parametrize("kind", ODD)
    @pytest.mark.parametrize("name", ["shard-1-of-1.sqlite", "shard-1-of-1.sqlite-journal"])
    def test_irregular_file_is_refused(self, path, kind, name):
        odd = path.with_name(name)
        odd.unlink(missing_ok=True)
        make_odd(odd, kind)
        refused(path, f"expected to read .*{name}, .* Try another --corpus")

    @pytest.mark.parametrize("kind", ODD)
    def test_irregular_unfinished_file_is_refused(self, path, kind):
        make_odd(path.with_name("unfinished-3.json"), kind)
        with pytest.raises(UsageError, match=r"expected to read .*unfinished-3\.json"):
            reopen(path)

    @pytest.mark.parametrize("name", ["shard-1-of-1.sqlite", "unfinished-3.json"])
    def test_link_out_of_the_folder_is_refused(self, path, name):
        link, elsewhere = path.with_name(name), path.parent.parent / "elsewhere"
        shutil.copy(path, elsewhere)
        link.unlink(missing_ok=True)
        link.symlink_to(elsewhere)
        before = elsewhere.read_bytes()
        with pytest.raises(UsageError, match="got: a link, not a regular file"):
            reopen(path)
        assert elsewhere.read_bytes() == before

    @pytest.mark.parametrize(
        "data", [b"\x1b[31m\xff\n", b"x" * 5000, b"SQLite format 3\0" + b"\1" * 4080]
    )
    def test_file_of_another_format_is_refused(self, path, data):
        path.write_bytes(data)
        refused(path, "expected a corpus in .*, got another file")

    def test_truncated_or_changed_file_is_refused(self, path):
        data = bytearray(path.read_bytes())
        data[4096:] = b"\xff" * (len(data) - 4096)
        path.write_bytes(data)
        refused(path, "expected a corpus (in|of)")
        path.write_bytes(data[:4096])
        refused(path, "expected a corpus (in|of)")

    def test_oversized_file_is_refused(self, path, monkeypatch):
        monkeypatch.setattr(old_corpus, "_FILE_BYTES_MAX", 1000)
        refused(path, "more than 1,000 bytes")

    def test_write_ahead_log_is_refused(self, path):
        path.with_name(f"{path.name}-wal").write_bytes(b"x" * 100)
        refused(path, "-wal beside it")
        path.with_name(f"{path.name}-wal").unlink()
        change(path, "PRAGMA journal_mode = WAL")
        refused(path, "got another file")

    def test_journal_that_names_another_file_is_refused(self, path):
        precious = path.parent.parent / "precious"
        precious.write_bytes(b"kept")
        name = str(precious).encode()
        tail = b"\0\0\4\0" + name + len(name).to_bytes(4, "big")
        tail += (sum(name) & 0xFFFFFFFF).to_bytes(4, "big") + bytes.fromhex("d9d505f920a163d7")
        head = bytes.fromhex("d9d505f920a163d7") + b"\0\0\0\0" + b"\0" * 500
        path.with_name(f"{path.name}-journal").write_bytes(head + tail)
        refused(path, "-journal beside it, which names another file")
        assert precious.read_bytes() == b"kept"

    @pytest.mark.parametrize(
        "statement",
        [
            "CREATE TABLE other (a)",
            "CREATE VIEW other AS SELECT 1",
            "CREATE INDEX other ON batches (cases)",
            "CREATE TRIGGER t AFTER INSERT ON batches BEGIN DELETE FROM findings; END",
            "ALTER TABLE batches ADD COLUMN more",
            "DROP TABLE findings",
        ],
    )
    def test_other_tables_and_triggers_are_refused(self, path, statement):
        change(path, statement)
        refused(path, "got other tables")

    @pytest.mark.parametrize(
        ("statement", "values", "words"),
        [
            ("DELETE FROM campaign", (), "its head: .* not enough values"),
            ("INSERT INTO campaign SELECT head FROM campaign", (), "its head: .* too many values"),
            ("UPDATE campaign SET head = ?", ("\x1b[31m",), "its head: .* Invalid JSON"),
            ("UPDATE campaign SET head = ?", (b"\xff",), "its head"),
            ("UPDATE campaign SET head = 3", (), "its head: .* should be an object, got 3"),
            ("UPDATE campaign SET head = replace(head, '[1,1]', '[1,1000000001]')", (), "its head"),
            ("UPDATE campaign SET head = replace(head, '[1,1]', '[2,1]')", (), "its head"),
            ("UPDATE batches SET report = ?", ("[" * 100_000,), "batch 0 from case 0: .*recursion"),
            ("UPDATE batches SET report = ?", ("{}",), "batch 0 from case 0: .* index: Field req"),
            ("UPDATE batches SET batch = 1", (), "batch 1 from case 0: .* of another batch"),
            ("UPDATE batches SET start = ?", ("\x1b",), "from case .x1b: .* of another batch"),
            ("UPDATE batches SET cases = 1e300", (), "of another batch"),
            (
                "UPDATE batches SET report = ?",
                (to_json(report_of(0, seed=1)),),
                "a batch of another seed than 7",
            ),
            (
                "UPDATE batches SET report = ?",
                (to_json(report_of(0, verdicts={"pass": 9999})),),
                "expected counts of 50 cases",
            ),
            (
                "UPDATE batches SET report = replace(report, '\"cases\":50', '\"cases\":\"50\"')",
                (),
                "counts: cases: Input should be a valid integer",
            ),
            ("UPDATE findings SET finding = ?", (b"\0",), "finding 1"),
            ("UPDATE findings SET finding = ?", (to_json(found("a", bundle="..")),), "finding 1"),
        ],
    )  # fmt: skip
    def test_every_value_is_checked(self, path, statement, values, words):
        change(path, statement, values=values)
        refused(path, words)

    def test_cyclic_pages_are_refused_in_bounded_time(self, path):
        """Each of many levels refers to the next one many times."""
        with closing(sqlite3.connect(path)) as database, database:
            rows = [(index, 0, 50, to_json(report_of(index))) for index in range(1, 400)]
            database.executemany("INSERT INTO batches VALUES (?, ?, ?, ?)", rows)
        data = bytearray(path.read_bytes())
        interior = [at for at in range(4096, len(data), 4096) if data[at] == 5]
        assert interior
        for at in interior:
            cells = int.from_bytes(data[at + 3 : at + 5], "big")
            first = int.from_bytes(data[at + 12 : at + 14], "big")
            child = data[at + first : at + first + 4]
            for cell in range(cells):
                start = int.from_bytes(data[at + 12 + 2 * cell : at + 14 + 2 * cell], "big")
                data[at + start : at + start + 4] = child
        path.write_bytes(data)
        refused(path, "expected a corpus")


def test_unfinished_batch_that_nests_too_deep_is_run_again(path):
    path.with_name("unfinished-1.json").write_bytes(b"[" * 100_000)
    reopen(path)
    assert len(read_corpus(path).reports) == 1
