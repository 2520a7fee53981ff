"""A first visit to GPUs, run on the stand-in device, and its bundles of failing cases."""

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from tests.standin import NAME
from zero_sim.bundle import read_bundle, replay_bundle
from zero_sim.cli.main import main
from zero_sim.zero import unit


@pytest.fixture(scope="module")
def visit(tmp_path_factory):
    """Report of a complete visit by the command."""
    path = tmp_path_factory.mktemp("visit") / "report.json"
    asked = ("doctor", "--gpu", "--gpu-report", str(path))
    done = subprocess.run(
        [sys.executable, "-m", "zero_sim", *asked],
        env={**os.environ, "STANDIN_DEVICES": "3", "ZERO_SIM_TEST_RING": "0,2,1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(path.read_text())


def test_every_visit_step_passes(visit):
    assert [step["ok"] for step in visit["steps"]] == [True] * 4
    assert all(step["failures"] == [] for step in visit["steps"])


def test_visit_runs_on_three_ranks_and_finds_their_ring(visit):
    told = {step["name"]: step for step in visit["steps"]}
    assert "probe: ranks [0, 1, 2] add as ring 0 2 1" in told["own order"]["lines"]
    assert visit["machine"]["ranks"] == 3


def test_failing_case_is_replayed_on_device(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    with monkeypatch.context() as patch:
        patch.setattr(unit, "all_gather", lambda *args, **kwargs: None)
        asked = ["doctor", "--gpu", "--gpu-report", str(path), "--step", "simulated"]
        done = CliRunner().invoke(main, asked)
        assert done.exit_code == 1, done.output
        (step,) = json.loads(path.read_text())["steps"]
        failure = step["failures"][0]
        bundle = read_bundle(tmp_path / "report-bundles" / failure["bundle"])
        assert failure["again"].endswith(f" --device {NAME}")
        assert bundle.ran.device == NAME
        assert replay_bundle(bundle).same
    assert replay_bundle(bundle).outcome == "fixed"
