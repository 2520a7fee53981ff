"""A first visit to a machine with GPUs, on the stand-in for NCCL."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from zero_sim import visit
from zero_sim.backends import transports
from zero_sim.bundle import read_bundle, replay_bundle
from zero_sim.cli import main as cli
from zero_sim.run import real_judge
from zero_sim.zero import unit

STEPS = ["simulated", "one rank", "folded", "own order"]


@pytest.fixture(scope="module")
def standin():
    """A machine with three devices."""
    folder = Path(__file__).parent / "backends"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(folder), *sys.path])
        patch.setattr(real_judge, "PRELOAD", ("preload_standin", *real_judge.PRELOAD))
        patch.setenv("ZERO_SIM_TEST_GPUS", "3")
        patch.setenv("ZERO_SIM_TEST_RING", "0,2,1")
        import standin_nccl

        patch.setattr(transports, "_MAKERS", dict(transports._MAKERS))
        patch.setattr(transports, "_MADE", {})
        standin_nccl.install()
        yield


def run(path, *options):
    return CliRunner().invoke(cli.main, ["doctor", "--gpu", "--gpu-report", str(path), *options])


@pytest.fixture(scope="module")
def whole(standin, tmp_path_factory):
    """A complete visit: its output and its report."""
    path = tmp_path_factory.mktemp("visit") / "report.json"
    done = run(path)
    return done, json.loads(path.read_text())


def test_visit_passes_every_step(whole):
    done, report = whole
    assert done.exit_code == 0, done.output
    assert [(step["name"], step["ok"]) for step in report["steps"]] == [
        (name, True) for name in STEPS
    ]
    assert "ok  own order" in done.output


def test_report_holds_machine_steps_and_probes(whole):
    report = whole[1]
    assert report["machine"]["ranks"] == 3
    told = {step["name"]: step for step in report["steps"]}
    assert "probe: ranks [0, 1, 2] add as ring 0 2 1" in told["own order"]["lines"]


@pytest.fixture
def ungathered(monkeypatch):
    """Break the system: it gathers no params."""
    with monkeypatch.context() as patch:
        patch.setattr(unit, "all_gather", lambda *args, **kwargs: None)
        yield patch


def test_failing_case_leaves_a_bundle(standin, tmp_path, ungathered):
    done = run(tmp_path / "report.json", "--step", "simulated")
    assert done.exit_code == 1
    (step,) = json.loads((tmp_path / "report.json").read_text())["steps"]
    assert (step["ok"], step["name"]) == (False, "simulated")
    failure = step["failures"][0]
    path = tmp_path / "report-bundles" / failure["bundle"]
    assert failure["again"] == f"zero-sim replay {path.name} --bundles {path.parent}"
    assert f"again: {failure['again']}" in done.output.replace("\n", "")
    assert f"bundles in {path.parent}" in done.output.replace("\n", "")
    bundle = read_bundle(path)
    assert (bundle.scenario.name, bundle.verdict) == (failure["case"], "fail")
    assert replay_bundle(bundle).same
    ungathered.undo()
    assert replay_bundle(bundle).outcome == "fixed"


def test_raising_step_prints_its_retry_command_and_the_next_runs(standin, tmp_path, monkeypatch):
    def raises(*args, backend, **kwargs):
        raise RuntimeError(f"no such device for {backend}")

    monkeypatch.setattr(visit, "open_judge", raises)
    done = run(tmp_path / "report.json", "--step", "one rank", "--step", "folded")
    assert done.exit_code == 1
    first, second = json.loads((tmp_path / "report.json").read_text())["steps"]
    assert first["lines"] == [
        "RuntimeError: no such device for nccl",
        "  again: zero-sim doctor --gpu --step 'one rank'",
    ]
    assert "no such device" in first["failures"][0]["error"]
    assert (second["name"], second["ok"]) == ("folded", False)


def test_unknown_step_is_refused(standin, tmp_path):
    done = run(tmp_path / "report.json", "--step", "kernel")
    assert done.exit_code == 2
    assert f"expected --step to be one of {', '.join(STEPS)}; got kernel" in done.output


def test_json_option_is_refused_for_a_visit(tmp_path):
    done = run(tmp_path / "report.json", "--json")
    assert done.exit_code == 2
    assert "Try --gpu-report" in done.output


def test_visit_without_gpu_reports_the_missing_part(tmp_path, monkeypatch):
    monkeypatch.setattr(transports, "_MAKERS", dict(transports._MAKERS, nccl=_of_torch))
    monkeypatch.setattr(transports, "_MADE", {})
    done = run(tmp_path / "report.json")
    assert done.exit_code == 4
    assert "expected a torch with NCCL" in done.output or "expected a GPU" in done.output
    assert not (tmp_path / "report.json").exists()


def _of_torch():
    return transports.Nccl(transports.Cuda())
