"""Writing bundles: their files, contents and ids."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file

from zero_sim.bundle import bundle_id, write_bundle
from zero_sim.bundle import write as writer
from zero_sim.scenario.load import load_cases


def test_bundle_has_its_files(scenario, failed, folder, path):
    assert path == folder / bundle_id(scenario, failed.findings[0])
    assert {file.name for file in path.iterdir()} == {
        "bundle.json",
        "case.toml",
        "turns.json",
        "events.jsonl",
        "tensors.safetensors",
    }
    assert [file.name for file in folder.iterdir()] == [path.name]


def test_case_is_a_scenario_file(scenario, path):
    assert load_cases(path / "case.toml") == (scenario,)


def test_head_contains_seed_findings_and_versions(failed, path):
    head = json.loads((path / "bundle.json").read_text())
    assert (head["seed"], head["verdict"]) == (7, "fail")
    assert head["findings"] == json.loads(json.dumps([f.as_dict() for f in failed.findings]))
    assert head["environment"]["torch"] == str(torch.__version__)
    assert "+".join(world["digest"] for world in head["worlds"]) == failed.log_digest


def test_tensors_contain_the_differing_values(failed, path):
    tensors = load_file(path / "tensors.safetensors")
    index, finding = next(
        (i, found) for i, found in enumerate(failed.findings) if found.check == "equality.state"
    )
    first = finding.offset_in_param - finding.evidence.start
    assert tensors[f"{index}.expected"][first].item() == float.fromhex(finding.expected)
    assert tensors[f"{index}.got"][first].item() == float.fromhex(finding.got)


def test_each_event_is_a_line(failed, path):
    events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    calls = [event for event in events if event["event"] == "call"]
    assert len(calls) == failed.collectives
    assert json.loads((path / "turns.json").read_text()) == [log.turns for log in failed.logs]


class TestId:
    def test_same_failure_has_the_same_id_under_another_name(self, scenario, failed):
        renamed = dataclasses.replace(scenario, name="other", description="words")
        first = failed.findings[0]
        later = dataclasses.replace(first, message="said otherwise", got="0x0p+0")
        assert bundle_id(renamed, later) == bundle_id(scenario, first)

    @pytest.mark.parametrize("change", [{"step": 5}, {"rank": 2}, {"param": "x"}, {"check": "y"}])
    def test_another_finding_has_another_id(self, scenario, failed, change):
        first = failed.findings[0]
        other = dataclasses.replace(first, **change)
        assert bundle_id(scenario, other) != bundle_id(scenario, first)

    def test_another_case_has_another_id(self, scenario, failed):
        world = dataclasses.replace(scenario.world, size=4)
        other = dataclasses.replace(scenario, world=world)
        first = failed.findings[0]
        assert bundle_id(other, first) != bundle_id(scenario, first)


def test_bundle_of_the_same_failure_is_replaced(scenario, failed, folder, path):
    (path / "left-over").write_text("x")
    assert write_bundle(scenario, failed, folder=folder) == path
    assert not (path / "left-over").exists()
    assert [file.name for file in folder.iterdir()] == [path.name]


def test_failed_write_keeps_the_old_bundle(scenario, failed, folder, path, monkeypatch):
    before = (path / "bundle.json").read_bytes()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer.Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        write_bundle(scenario, failed, folder=folder)
    assert (path / "bundle.json").read_bytes() == before
    assert [file.name for file in folder.iterdir()] == [path.name]


def test_no_file_is_a_pickle(path):
    for file in path.iterdir():
        assert not file.read_bytes().startswith(b"\x80")
