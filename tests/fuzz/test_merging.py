"""Corpora of shards become one corpus of the campaign; what does not belong together is refused."""

import json
from dataclasses import replace

import pytest

from zero_sim.errors import UsageError
from zero_sim.fuzz.corpus import Head, open_corpus, read_corpus
from zero_sim.fuzz.merging import merge_corpora
from zero_sim.fuzz.records import BatchReport, batch_seed

HEAD = Head(seed=7, target="zero_sim", cases=50, shard=(1, 2))


def shard(folder, number, *, batches=(), head=HEAD):
    corpus = open_corpus(folder, head=replace(head, shard=(number, head.shard[1])))
    for index in batches:
        corpus.append(
            BatchReport(
                index=index,
                seed=batch_seed(head.seed, index),
                asked=50,
                cases=50,
                seconds=1.0,
                verdicts={"pass": 50},
            )
        )
    return folder


def test_two_shards_are_one_campaign(tmp_path):
    one = shard(tmp_path / "a", 1, batches=[0, 2])
    two = shard(tmp_path / "b", 2, batches=[1])
    merged = merge_corpora([two, one], into=tmp_path / "all")
    assert [report.index for report in merged.reports] == [0, 1, 2]
    assert merged.shards_missing == ()
    again = read_corpus(tmp_path / "all" / "batches-1-of-1.jsonl")
    assert again.head == replace(HEAD, shard=(1, 1))
    assert [report.index for report in again.reports] == [0, 1, 2]


def test_shards_may_share_a_folder(tmp_path):
    shard(tmp_path / "a", 1, batches=[0])
    shard(tmp_path / "a", 2, batches=[1])
    merged = merge_corpora([tmp_path / "a"], into=tmp_path / "all")
    assert [report.index for report in merged.reports] == [0, 1]


def test_a_shard_that_is_missing_is_told(tmp_path):
    merged = merge_corpora([shard(tmp_path / "a", 2)], into=tmp_path / "all")
    assert (merged.shards_missing, merged.shard_count) == ((1,), 2)


def test_bundles_come_along(tmp_path):
    for number, name in ((1, "a"), (2, "b")):
        folder = shard(tmp_path / name, number) / "bundles" / f"bundle-{name}"
        folder.mkdir(parents=True)
        (folder / "case.toml").write_text(name)
    merge_corpora([tmp_path / "a", tmp_path / "b"], into=tmp_path / "all")
    kept = {path.parent.name: path.read_text() for path in (tmp_path / "all").rglob("case.toml")}
    assert kept == {"bundle-a": "a", "bundle-b": "b"}


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 8},
        {"target": "torch-ddp"},
        {"device": "cuda"},
        {"cases": 10},
        {"options": (("a", "1"),)},
        {"shard": (1, 3)},
    ],
    ids=lambda other: next(iter(other)),
)
def test_shards_of_two_campaigns_are_refused(tmp_path, other):
    one = shard(tmp_path / "a", 1)
    two = shard(tmp_path / "b", 2, head=replace(HEAD, **other))
    with pytest.raises(UsageError, match="expected shards of one campaign"):
        merge_corpora([one, two], into=tmp_path / "all")
    assert not (tmp_path / "all").exists()


def test_a_shard_that_is_there_twice_is_refused(tmp_path):
    one, two = shard(tmp_path / "a", 1), shard(tmp_path / "b", 1)
    with pytest.raises(UsageError, match="expected each shard once, got 1/2"):
        merge_corpora([one, two], into=tmp_path / "all")


def test_a_folder_with_a_corpus_is_not_written_over(tmp_path):
    one = shard(tmp_path / "a", 1)
    before = sorted((tmp_path / "a").iterdir())
    with pytest.raises(UsageError, match="expected a folder without a corpus"):
        merge_corpora([one], into=tmp_path / "a")
    assert sorted((tmp_path / "a").iterdir()) == before


def test_a_folder_without_a_corpus_is_refused(tmp_path):
    with pytest.raises(UsageError, match="expected a corpus in"):
        merge_corpora([tmp_path], into=tmp_path / "all")


@pytest.mark.parametrize(
    "head",
    [b"", b"{", b"[1]", b"3", b'{"seed": 1}', json.dumps(HEAD.as_dict() | {"x": 1}).encode()],
)
def test_a_file_that_is_no_corpus_is_refused(tmp_path, head):
    (tmp_path / "batches-1-of-2.jsonl").write_bytes(head + b"\n")
    with pytest.raises(UsageError, match="to begin with the head of a corpus"):
        merge_corpora([tmp_path], into=tmp_path / "all")


@pytest.mark.parametrize("options", [(), (("a", "1"), ("b", "x"))])
def test_a_head_comes_back(options):
    head = replace(HEAD, device="cuda", options=options)
    assert Head.from_dict(json.loads(json.dumps(head.as_dict()))) == head
