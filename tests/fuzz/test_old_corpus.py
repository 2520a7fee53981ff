"""Corpora of earlier versions: converted when opened, with every value checked."""

import json

import pytest

from tests.fuzz.corpus_reports import HEAD, found, report_of
from zero_sim.errors import UsageError
from zero_sim.fuzz.corpus import open_corpus, read_corpus
from zero_sim.fuzz.records import to_json

OLD_HEAD = {
    "format": "zero_sim corpus",
    "version": 1,
    "seed": HEAD.seed,
    "target": "zero_sim",
    "cases": 50,
    "shard": [1, 1],
}


def old_line(report):
    """Return a report as earlier versions wrote it: flat, with fields removed since."""
    data = json.loads(to_json(report))
    return {**data.pop("counts"), **data, "asked": 50}


def write(folder, *lines, head=OLD_HEAD):
    folder.mkdir(exist_ok=True)
    path = folder / "batches-1-of-1.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in (head, *lines)))
    return path


def test_old_corpus_is_converted_once_and_kept(tmp_path):
    reports = [report_of(0, found=(found("a"),)), report_of(1, cases_with={"reload": 1 << 49})]
    old = write(tmp_path, *map(old_line, reports))
    before = old.read_bytes()
    with open_corpus(tmp_path, head=HEAD) as corpus:
        assert corpus.converted == old
        assert [each.index for each in corpus.kept.reports] == [0, 1]
        assert corpus.kept.reports[1] == reports[1]
        assert [*corpus.kept.found.values()] == [found("a")]
    assert old.read_bytes() == before
    old.write_bytes(b"nobody reads this any more")
    with open_corpus(tmp_path, head=HEAD) as corpus:
        assert corpus.converted is None
        assert len(corpus.kept.reports) == 2


def test_options_device_and_family_are_converted(tmp_path):
    more = {"options": {"b": "x", "a": "1"}, "device": "cuda", "family": 4}
    head = read_corpus(write(tmp_path, head=OLD_HEAD | more)).head
    assert (head.options, head.device, head.family) == ((("a", "1"), ("b", "x")), "cuda", 4)


def test_old_corpus_of_another_campaign_is_refused(tmp_path):
    write(tmp_path, head=OLD_HEAD | {"seed": 8})
    for _ in range(2):
        with (
            pytest.raises(UsageError, match="Try another --corpus, or its original seed"),
            open_corpus(tmp_path, head=HEAD),
        ):
            pass


def test_fixed_findings_are_dropped_and_their_batches_do_not_count(tmp_path):
    met = report_of(
        0, found=(found("a"), found("b")), keys={"a||||": 1}, verdicts={"pass": 49, "fail": 1}
    )
    fixed = {"fixed": ["a", "", "", "", ""]}
    kept = read_corpus(write(tmp_path, old_line(met), old_line(report_of(1)), fixed))
    assert [(each.index, counts) for each, counts in kept.counted()] == [(0, False), (1, True)]
    assert [one.key.check for one in kept.found.values()] == ["b"]


def test_truncated_line_is_dropped(tmp_path):
    path = write(tmp_path, old_line(report_of(0)))
    path.write_bytes(path.read_bytes() + b'{"index": 1, "se')
    assert len(read_corpus(path).reports) == 1


def test_missing_fields_of_still_older_reports_are_filled(tmp_path):
    line = old_line(report_of(0)) | {"layouts": {"aligned": 2}}
    for name in ("params_only", "cases_with", "taken", "lost", "futile"):
        del line[name]
    assert [*read_corpus(write(tmp_path, line)).reports] == [report_of(0)]


@pytest.mark.parametrize(
    "head",
    [
        {},
        [1],
        3,
        {"seed": 1},
        OLD_HEAD | {"x": 1},
        OLD_HEAD | {"version": 2},
        OLD_HEAD | {"shard": [1, 10**9]},
        OLD_HEAD | {"seed": "7"},
    ],
)
def test_file_without_a_corpus_head_is_refused(tmp_path, head):
    with pytest.raises(UsageError, match="to begin with the head of a corpus"):
        read_corpus(write(tmp_path, head=head))


@pytest.mark.parametrize("data", [b"", b"{", b"\x1b[31m\xff\n", b"[" * 100_000])
def test_file_without_json_is_refused(tmp_path, data):
    path = write(tmp_path)
    path.write_bytes(data)
    with pytest.raises(UsageError, match="to begin with the head of a corpus") as caught:
        read_corpus(path)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 1}, "expected a batch of seed 7"),
        ({"verdicts": {"pass": 9999}}, "expected counts of 50 cases"),
        ({"cases": "50"}, "counts: cases: "),
        ({"found": [[[[]]]]}, "found: 0: "),
    ],
)
def test_line_of_another_campaign_is_named(tmp_path, change, words):
    report = old_line(report_of(0))
    with pytest.raises(UsageError, match=rf"batches-1-of-1\.jsonl line 3: .*{words}"):
        read_corpus(write(tmp_path, report, report | change))


@pytest.mark.parametrize("levels", [40, 100_000])
def test_line_that_nests_too_deep_is_refused(tmp_path, levels):
    path = write(tmp_path, old_line(report_of(0)))
    path.write_bytes(path.read_bytes() + b"[" * levels + b"]" * levels + b"\n")
    with pytest.raises(UsageError, match=r"batches-1-of-1\.jsonl line 3: "):
        read_corpus(path)
