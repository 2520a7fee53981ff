"""What may lie where a corpus is looked for: refused, never followed or waited for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.odd_files import make_odd
from zero_sim.errors import UsageError
from zero_sim.fuzz.corpus import Corpus, Head, open_corpus
from zero_sim.fuzz.records import BatchReport, batch_seed

HEAD = Head(seed=0, target="zero_sim", cases=50, shard=(1, 1))
REPORT = BatchReport(index=0, seed=batch_seed(HEAD.seed, 0), asked=50, cases=50, seconds=1.0)
ODD = ("fifo", "folder", "loop", "dangling", "device", "socket")


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return open_corpus(tmp_path / "corpus", head=HEAD)


def leads_out(path: Path) -> Path:
    """Put a link in a file's place that leads to the same content in another folder."""
    elsewhere = path.parent.parent / "elsewhere"
    elsewhere.write_bytes(path.read_bytes() if path.exists() else b"")
    path.unlink(missing_ok=True)
    path.symlink_to(elsewhere)
    return elsewhere


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", ["batches-1-of-1.jsonl", "unfinished-3.json"])
def test_what_is_no_regular_file_is_refused(corpus: Corpus, kind: str, name: str) -> None:
    path = corpus.folder / name
    path.unlink(missing_ok=True)
    make_odd(path, kind)
    with pytest.raises(UsageError, match=f"expected to read .*{name}, .* Try another --corpus"):
        open_corpus(corpus.folder, head=HEAD)


@pytest.mark.parametrize("name", ["batches-1-of-1.jsonl", "unfinished-3.json"])
def test_a_link_out_of_the_folder_is_refused(corpus: Corpus, name: str) -> None:
    elsewhere = leads_out(corpus.folder / name)
    before = elsewhere.read_bytes()
    with pytest.raises(UsageError, match="got: a link, not a regular file"):
        open_corpus(corpus.folder, head=HEAD)
    assert elsewhere.read_bytes() == before


def test_nothing_is_added_to_what_a_link_leads_to(corpus: Corpus) -> None:
    elsewhere = leads_out(corpus.path)
    before = elsewhere.read_bytes()
    with pytest.raises(OSError, match="a link, not a regular file"):
        corpus.append(REPORT)
    assert elsewhere.read_bytes() == before


@pytest.mark.parametrize("levels", [40, 100_000])
def test_a_line_that_nests_too_deep_is_named(corpus: Corpus, levels: int) -> None:
    corpus.append(REPORT)
    with corpus.path.open("ab") as file:
        file.write(b"[" * levels + b"]" * levels + b"\n")
    with pytest.raises(UsageError, match=r"batches-1-of-1\.jsonl line 3: .* more than 32 levels"):
        open_corpus(corpus.folder, head=HEAD)


def test_an_unfinished_batch_that_nests_too_deep_is_run_again(corpus: Corpus) -> None:
    corpus.unfinished(0).write_bytes(b"[" * 100_000)
    assert open_corpus(corpus.folder, head=HEAD).reports == []


def test_a_head_of_somebody_else_is_shown_without_what_a_terminal_does(corpus: Corpus) -> None:
    corpus.path.write_bytes(b"\x1b[31m\xff\n")
    with pytest.raises(UsageError) as caught:
        open_corpus(corpus.folder, head=HEAD)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 1}, "expected a batch of seed 0"),
        ({"verdicts": {"pass": 9999}}, "expected what came of 50 cases"),
        ({"cases": "50"}, "expected cases to be"),
    ],
)
def test_a_line_that_is_no_batch_of_the_campaign_is_named(
    corpus: Corpus, change: dict[str, object], words: str
) -> None:
    corpus.append(REPORT)
    with corpus.path.open("a") as file:
        file.write(json.dumps(REPORT.as_dict() | change) + "\n")
    with pytest.raises(UsageError, match=rf"batches-1-of-1\.jsonl line 3: .*{words}"):
        open_corpus(corpus.folder, head=HEAD)
