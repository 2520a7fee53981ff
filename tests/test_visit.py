"""A first visit to a machine with GPUs, taken on the stand-in for NCCL."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from zero_sim import visit
from zero_sim.backends import transports
from zero_sim.cli import main as cli
from zero_sim.run import real_judge


@pytest.fixture
def standin(monkeypatch):
    """A machine with three devices."""
    folder = Path(__file__).parent / "backends"
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.setattr(real_judge, "PRELOAD", ("preload_standin", *real_judge.PRELOAD))
    monkeypatch.setenv("ZERO_SIM_TEST_GPUS", "3")
    monkeypatch.setenv("ZERO_SIM_TEST_RING", "0,2,1")
    import standin_nccl

    monkeypatch.setattr(transports, "_MAKERS", dict(transports._MAKERS))
    monkeypatch.setattr(transports, "_MADE", {})
    standin_nccl.install()


def run(path, *options):
    return CliRunner().invoke(cli.main, ["doctor", "--gpu", "--gpu-report", str(path), *options])


def test_it_runs_to_its_end_and_the_report_has_all_that_is_to_be_sent_home(standin, tmp_path):
    done = run(tmp_path / "report.json", "--seconds", "100000")
    report = json.loads((tmp_path / "report.json").read_text())
    told = {step["name"]: step for step in report["steps"]}
    assert done.exit_code == 0, done.output
    assert [step["ok"] for step in report["steps"]] == [True] * 8
    assert told["machine"]["details"]["ranks"] == 3
    assert len(told["kernels"]["details"]["hashes"]) == 14
    assert told["order"]["details"]["arrangement"]["rings"] == [[0, 2, 1]]
    assert "probe: ranks [0, 1, 2] add as ring 0 2 1" in told["own order"]["told"]
    assert "ok  own order" in done.output


def test_what_fails_is_kept_with_its_case_and_the_next_step_is_taken(standin, monkeypatch):
    taken = visit.Visit(seconds=100000.0)
    case = visit._cases(3, "linear")[0]

    def fails(step):
        visit._judge_all(step, judged_wrong, [case])

    def judged_wrong(scenario):
        from zero_sim.findings.records import not_judged

        return not_judged(scenario.name, "broken on purpose")

    def raises(step):
        raise RuntimeError("no such device")

    def passes(step):
        step.told.append("fine")

    plan = [("a", "", fails), ("b", "", raises), ("c", "", passes)]
    monkeypatch.setattr(taken, "_plan", lambda: iter(plan))
    steps = taken.take()
    assert [step.ok for step in steps] == [False, False, True]
    assert steps[0].failures[0]["scenario"]["model"]["name"] == "mlp"
    assert steps[0].failures[0]["result"]["error"] == "broken on purpose"
    assert steps[1].told == ["RuntimeError: no such device"]
    assert "no such device" in steps[1].details["traceback"]


def test_without_time_no_step_is_begun(standin, tmp_path):
    done = run(tmp_path / "report.json", "--seconds", "0")
    assert done.exit_code == 1
    assert done.output.count("not taken: no time left") == 8


def test_without_a_gpu_it_says_what_is_missing(tmp_path):
    done = run(tmp_path / "report.json")
    assert done.exit_code == 4
    assert "expected a torch with NCCL" in done.output or "expected a GPU" in done.output
    assert not (tmp_path / "report.json").exists()


def test_its_report_is_no_json_of_the_command(tmp_path):
    done = run(tmp_path / "report.json", "--json")
    assert done.exit_code == 2
    assert "Try --gpu-report" in done.output
