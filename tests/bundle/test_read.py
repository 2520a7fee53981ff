"""Reading bundles: contents roundtrip, or one clear error refuses them."""

import copy
import hashlib
import json
import re
from dataclasses import replace

import pytest
import torch

from zero_sim.bundle import find_bundle, find_bundles, read_bundle, write_bundle
from zero_sim.errors import BundleError


def change(path, edit):
    """Edit the parsed head of a bundle."""
    head = json.loads((path / "bundle.json").read_text())
    edit(head)
    (path / "bundle.json").write_text(json.dumps(head))


def rewrite(path, file, data):
    """Replace the content of a file, and its size and digest in the head."""
    (path / file).write_bytes(data)
    facts = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    change(path, lambda head: head["files"].update({file: facts}))


def test_contents_roundtrip(path, scenario, failed):
    bundle = read_bundle(path)
    assert bundle.scenario == scenario
    assert bundle.findings == failed.findings
    assert bundle.notes == failed.notes
    assert bundle.strip == failed.strip
    assert bundle.strip is not None
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", bundle.written)
    assert [log.collectives for log in bundle.logs] == [log.collectives for log in failed.logs]
    assert [log.turns for log in bundle.logs] == [log.turns for log in failed.logs]
    for read, wrote in zip(bundle.findings, failed.findings, strict=True):
        assert (read.evidence is None) == (wrote.evidence is None)
        if wrote.evidence is not None:
            assert read.evidence.start == wrote.evidence.start
            assert torch.equal(read.evidence.got, wrote.evidence.got)
            assert torch.equal(read.evidence.expected, wrote.evidence.expected)


def test_harness_marks_roundtrip(scenario, failed, folder):
    log = copy.copy(failed.logs[0])
    log.harness = {1, 4}
    marked = replace(failed, logs=(log, *failed.logs[1:]))
    written = write_bundle(scenario, marked, folder=folder)
    assert [each.harness for each in read_bundle(written).logs] == [
        {1, 4}, *(each.harness for each in failed.logs[1:]),
    ]  # fmt: skip


@pytest.mark.parametrize("file", ["turns.json", "events.jsonl", "tensors.safetensors"])
def test_truncated_file_is_named(path, file):
    data = (path / file).read_bytes()
    (path / file).write_bytes(data[:-9])
    with pytest.raises(BundleError, match=f"expected {len(data)} bytes in {file}"):
        read_bundle(path)


@pytest.mark.parametrize("file", ["turns.json", "events.jsonl", "tensors.safetensors"])
def test_missing_file_is_named(path, file):
    (path / file).unlink()
    with pytest.raises(BundleError, match=f"expected to read {file}, got: No such file"):
        read_bundle(path)


def test_changed_file_is_named(path):
    data = (path / "turns.json").read_bytes()
    (path / "turns.json").write_bytes(data.replace(b"1", b"0"))
    with pytest.raises(BundleError, match=r"turns\.json as it was written"):
        read_bundle(path)


def test_truncated_head_is_refused(path):
    text = (path / "bundle.json").read_text()
    (path / "bundle.json").write_text(text[: len(text) // 2])
    with pytest.raises(BundleError, match=r"bundle\.json: expected JSON"):
        read_bundle(path)


def set_(*keys, to):
    def edit(head):
        for key in keys[:-1]:
            head = head[key]
        head[keys[-1]] = to

    return edit


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (set_("format", to="other"), 'expected a bundle, with "format": "zero_sim bundle"'),
        (set_("version", to=2), "a newer zero_sim wrote it. Upgrade"),
        (set_("version", to="1"), "version: expected a valid integer, got '1'"),
        (set_("version", to=0), "version: expected 1, got 0"),
        (set_("more", to=1), "bundle.json.more: expected no field of this name"),
        (lambda head: head.pop("worlds"), "bundle.json.worlds: expected a value, got none"),
        (set_("id", to="0" * 12), "the id of the scenario and the first finding"),
        (
            set_("verdict", to="pass"),
            "verdict: expected 'fail', 'error' or 'inconclusive', got 'pass'",
        ),
        (set_("findings", to=[]), "findings: expected at least one"),
        (
            set_("findings", 0, "step", to="2"),
            "findings[0].step: expected a valid integer, got '2'",
        ),
        (set_("findings", 0, "step", to=True), "expected a valid integer, got True"),
        (set_("findings", 0, "evidence", to=1), "findings[0].evidence: expected an object, got 1"),
        (set_("environment", "threads", to=1.5), "expected a valid integer, got 1.5"),
        (set_("evidence", 0, "finding", to=99), "evidence[0].finding[0]: expected 0 to"),
        (set_("strip", to=1), "strip: expected an object, got 1"),
        (set_("strip", "stop", to=10**9), "strip: expected a part of"),
        (set_("strip", "shards", 0, "ranks", to=[]), "strip.shards: expected at least one rank"),
        (set_("strip", "differ_ranks", to=[99]), "strip.differ_ranks[0]: expected 0 to"),
        (set_("strip", "shards", 0, "ranks", to=[99]), "strip.shards[0]: expected 0 to"),
        (set_("strip", "differ", 0, to=[1]), "strip.differ[0][1]: expected a value, got none"),
        (
            set_("strip", "buckets", 0, "index", to=-1),
            "strip.buckets[0].index: expected an integer of at",
        ),
        (set_("written", to="long ago"), "written: expected a day such as"),
        (set_("files", "../x", to={"bytes": 1, "sha256": "0"}), "files: expected"),
        (set_("files", to={}), "files: expected"),
        (set_("worlds", 0, "calls", to=1), "worlds[0]: expected 1 calls"),
        (set_("worlds", 0, "refused", to=10**6), "worlds[0].refused[0]: expected 0 to"),
        (set_("worlds", to=[]), "turns.json: expected 0 lists"),
        (set_("scenario", "world", "size", to=0), "world.size: expected an integer at least 1"),
        (set_("scenario", "model", "nmae", to="mlp"), "model.nmae: unknown field"),
        (set_("scenario", "system", "target", to="os:system"), "expected a registered target"),
        (set_("seed", to=99), "seed: expected 7, as in the scenario, got 99"),
        (set_("worlds", 0, "digest", to="0"), "worlds[0].digest: expected the digest of"),
        (set_("findings", 1, "step", to=-1), "findings[1].step: expected an integer of at least 0"),
        (set_("findings", 1, "rank", to=3), "findings[1].rank[0]: expected 0 to 2"),
        (set_("findings", 1, "index", to=[-1]), "findings[1].index[0]: expected an"),
        (
            set_("findings", 1, "differ_spans", to=[[3, 1]]),
            "findings[1].differ_spans: expected spans",
        ),
        (set_("findings", 1, "ulp", to=10**30), "findings[1].ulp: expected an integer of"),
        (set_("strip", "padding", to=[[-3, 1]]), "strip.padding[0][0]: expected an integer"),
        (set_("evidence", 0, "start", to=-1), "evidence[0].start: expected an integer"),
        (set_("notes", to=json.loads("[" * 50 + "]" * 50)), "more than 32 levels"),
    ],
)
def test_invalid_head_is_refused(path, edit, said):
    change(path, edit)
    with pytest.raises(BundleError) as caught:
        read_bundle(path)
    assert said in str(caught.value)
    assert caught.value.exit_status == 2


LONG = "n" * 100_000


@pytest.mark.parametrize(
    "edit",
    [
        set_("id", to=LONG),
        set_("verdict", to=LONG),
        set_("verdict", to="n " * 50_000),
        set_(LONG, to=1),
        set_("scenario", "system", "target", to=LONG),
        set_("scenario", "model", LONG, to=1),
        set_("scenario", "model", "dtype", to=LONG),
        set_("target", to=LONG),
    ],
)
def test_long_value_is_clipped_in_the_error(path, edit):
    change(path, edit)
    with pytest.raises(
        BundleError, match=r"\[\.\.\. \d+,\d+ characters \.\.\.\]|expected .*got"
    ) as caught:
        read_bundle(path)
    assert len(str(caught.value)) < 4_000


@pytest.mark.parametrize(
    ("file", "data", "said"),
    [
        ("turns.json", b"[[0], [1.5]]", "turns.json[1][0]: expected 0 to 1, got 1.5"),
        ("turns.json", b"[[0], [-1]]", "turns.json[1][0]: expected 0 to"),
        ("turns.json", b"[" * 100_000, "turns.json: expected JSON"),
        ("turns.json", b"{}", "turns.json: expected a list, got an object"),
        ("events.jsonl", b"[]\n", "events.jsonl line 1: expected an object, got a list"),
        ("events.jsonl", b'{"world":0}\n', "line 1.event: expected group, call or moment"),
        ("events.jsonl", b'{"world":9,"event":"call"}\n', "line 1.world[0]: expected 0 to 1"),
        ("events.jsonl", b'{"world":0,"event":"call","group":0}\n', "line 1.group[0]: expected"),
        ("events.jsonl", b"", "worlds[0]: expected"),
        ("tensors.safetensors", b"\x80\x04junk", "tensors.safetensors: expected safetensors"),
    ],
)
def test_invalid_content_is_refused(path, file, data, said):
    rewrite(path, file, data)
    with pytest.raises(BundleError) as caught:
        read_bundle(path)
    assert said in str(caught.value)


def test_missing_field_gets_its_default(path, failed):
    def edit(head):
        del head["findings"][0]["ulp"]
        del head["findings"][0]["differ_spans"]
        del head["scenario"]["world"]["races"]
        del head["strip"], head["written"]

    change(path, edit)
    assert read_bundle(path).findings[0].check == failed.findings[0].check


class TestFindSeveral:
    def test_bundles_are_found_by_name_and_in_folders(self, path, folder):
        assert find_bundles([], folder=folder) == [path]
        assert find_bundles([str(folder)], folder=folder / "elsewhere") == [path]
        assert find_bundles([path.name[:5], str(path)], folder=folder) == [path]

    def test_folder_without_bundles_is_an_error(self, folder):
        with pytest.raises(BundleError, match="expected bundles, got none"):
            find_bundles([], folder=folder)


class TestFind:
    def test_bundle_is_found_by_id_prefix_and_path(self, path, folder):
        assert find_bundle(path.name, folder=folder) == path
        assert find_bundle(path.name[:4], folder=folder) == path
        assert find_bundle(str(path), folder=folder / "elsewhere") == path

    @pytest.mark.parametrize("name", ["zzz", ""])
    def test_unknown_bundle_is_refused_with_the_known_ones(self, path, folder, name):
        with pytest.raises(BundleError, match=rf"bundles there: 1 \({path.name}\)"):
            find_bundle(name, folder=folder)

    def test_folder_without_bundles_is_mentioned(self, folder):
        with pytest.raises(BundleError, match="bundles there: none"):
            find_bundle("abc", folder=folder)

    def test_ambiguous_prefix_is_refused(self, folder):
        for name in ("abc1", "abc2"):
            (folder / name).mkdir(parents=True)
            (folder / name / "bundle.json").write_text("{}")
        with pytest.raises(BundleError, match="more of the id than 'abc'"):
            find_bundle("abc", folder=folder)
