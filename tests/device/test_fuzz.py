"""A campaign on a device, whose findings are kept and replayed there."""

import json

import pytest
from click.testing import CliRunner

from tests.standin import NAME
from zero_sim.bundle import read_bundle, replay_bundle
from zero_sim.cli.main import main
from zero_sim.zero import unit


def fuzz(folder, *options):
    return CliRunner().invoke(
        main, ["fuzz", "--device", NAME, "--corpus", str(folder), "--json", *options]
    )


def test_campaign_runs_on_device(tmp_path):
    done = fuzz(tmp_path, "--cases", "10")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert (told["device"], told["cases"], told["findings"]) == (NAME, 10, [])


@pytest.fixture
def broken(monkeypatch):
    """Break the system: it gathers no params."""
    monkeypatch.setattr(unit, "all_gather", lambda *args, **kwargs: None)


@pytest.fixture
def found(tmp_path, broken):
    """The corpus folder and first finding of a short campaign."""
    done = fuzz(tmp_path, "--cases", "10")
    assert done.exit_code == 1, done.output
    return tmp_path, json.loads(done.stdout)["findings"][0]


def test_finding_is_shrunk_and_replayed_on_device(found):
    folder, finding = found
    bundle = read_bundle(folder / "bundles" / finding["bundle"])
    assert bundle.ran.device == NAME
    assert bundle.environment.device == f"{NAME} (stand-in device)"
    replayed = replay_bundle(bundle)
    assert (replayed.outcome, replayed.same, replayed.same_events) == ("failed", True, True)
    assert any(note.startswith(f"computed on {NAME} ") for note in replayed.result.notes)


def test_earlier_finding_is_retried_and_printed_with_device(found):
    folder, finding = found
    done = CliRunner().invoke(
        main, ["fuzz", "--device", NAME, "--corpus", str(folder), "--cases", "10"]
    )
    assert done.exit_code == 1
    assert "Found earlier, still fails" in done.output
    replay = f"zero-sim replay {folder}/bundles/{finding['bundle']} --device {NAME}"
    assert replay in done.output.replace("\n", "")


def test_failing_scenario_file_leaves_a_bundle(tmp_path, broken, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("case.toml").write_text('schema = 1\n[model]\nname = "mlp"\n')
    done = CliRunner().invoke(main, ["run", "case.toml", "--device", NAME])
    assert done.exit_code == 1, done.output
    (bundle,) = tmp_path.joinpath(".zero-sim", "bundles").iterdir()
    assert f"zero-sim replay {bundle.name} --device {NAME}" in done.output
    again = CliRunner().invoke(main, ["replay", bundle.name])
    assert again.exit_code == 1
    assert "FAILED" in again.output
    smaller = CliRunner().invoke(main, ["shrink", bundle.name])
    assert smaller.exit_code == 1, smaller.output
    assert f"--device {NAME}" in smaller.output
