"""Joining corpora of shards into one; shards that do not belong together are refused."""

import json
from dataclasses import replace

import pytest

from tests.fuzz.corpus_reports import HEAD, found, make_shard, report_of
from zero_sim.errors import UsageError
from zero_sim.fuzz.corpus import open_corpus, read_corpus
from zero_sim.fuzz.joining import join_corpora


def test_two_shards_become_one_campaign(tmp_path):
    one = make_shard(tmp_path / "a", 1, batches=[0, 2])
    two = make_shard(tmp_path / "b", 2, batches=[1])
    joined = join_corpora([two, one], into=tmp_path / "all")
    assert [report.index for report in joined.kept.reports] == [0, 1, 2]
    assert joined.shards_missing == ()
    again = read_corpus(tmp_path / "all" / "shard-1-of-1.sqlite")
    assert again.head == HEAD
    assert again == joined.kept


def test_shards_may_share_a_folder(tmp_path):
    make_shard(tmp_path / "a", 1, batches=[0])
    make_shard(tmp_path / "a", 2, batches=[1])
    joined = join_corpora([tmp_path / "a"], into=tmp_path / "all")
    assert [report.index for report in joined.kept.reports] == [0, 1]


def test_findings_and_bundles_are_joined(tmp_path):
    for number, name in ((1, "a"), (2, "b")):
        with open_corpus(tmp_path / name, head=replace(HEAD, shard=(number, 2))) as corpus:
            corpus.append(report_of(number - 1, found=(found(name), found("same"))))
        folder = tmp_path / name / "bundles" / f"bundle-{name}"
        folder.mkdir(parents=True)
        (folder / "case.toml").write_text(name)
    joined = join_corpora([tmp_path / "a", tmp_path / "b"], into=tmp_path / "all")
    assert [one.key.check for one in joined.kept.found.values()] == ["a", "same", "b"]
    kept = {path.parent.name: path.read_text() for path in (tmp_path / "all").rglob("case.toml")}
    assert kept == {"bundle-a": "a", "bundle-b": "b"}


def test_old_corpora_next_to_their_conversion_are_ignored(tmp_path):
    make_shard(tmp_path / "a", 1, batches=[0])
    for number in (1, 2):
        head = {"format": "zero_sim corpus", "version": 1, "seed": 7, "target": "zero_sim"}
        head |= {"cases": 50, "shard": [number, 2]}
        (tmp_path / "a" / f"batches-{number}-of-2.jsonl").write_text(f"{json.dumps(head)}\n")
    joined = join_corpora([tmp_path / "a"], into=tmp_path / "all")
    assert (len(joined.kept.reports), joined.shards_missing) == (1, ())


def test_empty_files_of_killed_campaigns_are_ignored(tmp_path):
    one = make_shard(tmp_path / "a", 1, batches=[0])
    (tmp_path / "a" / "shard-2-of-2.sqlite").touch()
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "shard-1-of-1.sqlite").touch()
    joined = join_corpora([one.parent], into=tmp_path / "all")
    assert (len(joined.kept.reports), joined.shards_missing) == (1, (2,))


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 8},
        {"target": "torch-ddp"},
        {"device": "cuda"},
        {"cases": 10},
        {"options": (("a", "1"),)},
        {"family": 2},
    ],
    ids=lambda other: next(iter(other)),
)
def test_shards_of_two_campaigns_are_refused(tmp_path, other):
    one = make_shard(tmp_path / "a", 1)
    two = make_shard(tmp_path / "b", 2, head=replace(HEAD, **other))
    with pytest.raises(UsageError, match="expected shards of one campaign"):
        join_corpora([one, two], into=tmp_path / "all")
    assert not (tmp_path / "all").exists()


def test_shards_of_different_totals_are_refused(tmp_path):
    one, two = make_shard(tmp_path / "a", 1), make_shard(tmp_path / "b", 2, of=3)
    with pytest.raises(UsageError, match="expected shards of one campaign"):
        join_corpora([one, two], into=tmp_path / "all")


def test_duplicate_shard_is_refused(tmp_path):
    one, two = make_shard(tmp_path / "a", 1), make_shard(tmp_path / "b", 1)
    with pytest.raises(UsageError, match="expected each shard once, got 1/2"):
        join_corpora([one, two], into=tmp_path / "all")


def test_folder_with_a_corpus_is_not_overwritten(tmp_path):
    one = make_shard(tmp_path / "a", 1)
    before = one.read_bytes()
    with pytest.raises(UsageError, match="expected a folder without a corpus"):
        join_corpora([one], into=tmp_path / "a")
    assert [*(tmp_path / "a").iterdir()] == [one]
    assert one.read_bytes() == before


def test_folder_without_a_corpus_is_refused(tmp_path):
    with pytest.raises(UsageError, match="expected a corpus in"):
        join_corpora([tmp_path], into=tmp_path / "all")


def test_shard_folders_are_not_written_to(tmp_path):
    """They may be read-only."""
    one = make_shard(tmp_path / "a", 1, batches=[0])
    one.chmod(0o444)
    before = [(path, path.stat().st_mtime_ns) for path in (tmp_path / "a", one)]
    join_corpora([one], into=tmp_path / "all")
    assert [(path, path.stat().st_mtime_ns) for path in (tmp_path / "a", one)] == before
