"""`zero-sim run --target`: another target in place of the scenarios' own."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.cli.ended import assert_ended
from zero_sim.cli.main import main

SCENARIO = """schema = 1
[model]
name = "params"
shapes = [[3]]
[optimizer]
lr = 0.1
"""
MODULE = """
import os
import sys

from zero_sim.targets import find_target

class Mine:
    name = "mine"

    def build(self, module, *, scenario, group):
        engine = find_target("torch-ddp").build(module, scenario=scenario, group=group)
        right = engine.step

        def step(*, lr_factor):
            result = right(lr_factor=lr_factor)
            next(module.parameters()).data[0] += 1
            return result

        engine.step = step
        return engine
"""


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    (tmp_path / "case.toml").write_text(SCENARIO)
    (tmp_path / "a_wrong_target.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    command = ["run", "case.toml", "--target"]
    return lambda target, *more: CliRunner().invoke(main, [*command, target, *more])


def test_user_target_is_judged(invoke):
    assert_ended(invoke("a_wrong_target:Mine"), 1, "--target a_wrong_target:Mine")


class TestPrintedCommands:
    """Printed commands contain the imported target, because nothing else could find it."""

    TARGET = "a_wrong_target:Mine"

    def again(self, done, label):
        (line,) = [line for line in done.output.splitlines() if line.startswith(f"  {label}: ")]
        return CliRunner().invoke(main, shlex.split(line.removeprefix(f"  {label}: "))[1:])

    @pytest.mark.parametrize("label", ["reproduce", "replay"])
    def test_commands_of_a_run_repeat_it(self, invoke, label):
        assert_ended(self.again(invoke(self.TARGET), label), 1, "invariant.ownership")

    def test_command_of_a_replay_repeats_it(self, invoke):
        replayed = self.again(invoke(self.TARGET), "replay")
        assert self.again(replayed, "replay").output.startswith("FAILED ")

    @pytest.mark.parametrize("label", ["reproduce", "replay"])
    def test_commands_of_a_shrunk_case_repeat_it(self, invoke, label):
        options = ["--target", self.TARGET, "--output", "small.toml"]
        done = CliRunner().invoke(main, ["shrink", "case.toml", *options])
        assert done.exit_code == 1, done.output
        assert "invariant.ownership" in self.again(done, label).output

    def test_bundle_does_not_import_its_target(self, invoke):
        """Otherwise a failure of another system could count as fixed in zero_sim."""
        invoke(self.TARGET)
        (bundle,) = Path(".zero-sim/bundles").iterdir()
        done = CliRunner().invoke(main, ["replay", bundle.name])
        assert_ended(done, 2, f"run `zero-sim replay {bundle.name} --target {self.TARGET}`")


def test_case_outside_the_capabilities_is_refused(invoke):
    assert_ended(invoke("torch-ddp"), 2, "system.stage: this target supports 0, got 1. Try 0.")


def test_able_omits_unsupported_cases(invoke):
    done = invoke("torch-ddp", "--able")
    assert_ended(done, 5, "1 case left out: target 'torch-ddp' does not support system.stage")


def test_registered_target_is_judged(invoke):
    result = invoke("torch-zero-redundancy")
    assert result.exit_code == 0, result.output


def run_in_process(target):
    command = [sys.executable, "-m", "zero_sim", "run", "case.toml", "--target", target]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(command, env=env, capture_output=True, text=True)


def test_target_that_ends_the_process_is_an_error(invoke, tmp_path):
    """For any exit status, because the command runs in a process that does not import the
    target.
    """
    (tmp_path / "an_ending_target.py").write_text("import os\n\nos._exit(0)\n")
    done = run_in_process("an_ending_target:Mine")
    assert (done.returncode, done.stdout) == (2, "")
    assert "imported an_ending_target:Mine ended with exit status 0" in done.stderr
    assert 'an_ending_target.py", line 3, in <module>\n    os._exit(0)\n' in done.stderr


def test_target_that_ends_the_process_in_a_step_is_a_finding(invoke, tmp_path):
    """A rank that exits has failed, and the other cases continue."""
    (tmp_path / "a_leaving_target.py").write_text(
        MODULE.replace("next(module.parameters()).data[0] += 1", "os._exit(0)")
    )
    assert_ended(invoke("a_leaving_target:Mine"), 1, "world.rank-failed", "os._exit(0)")


def test_target_that_exits_in_refuses_is_an_error(invoke, tmp_path):
    (tmp_path / "a_refusing_target.py").write_text(
        MODULE + "\n    def refuses(self, scenario):\n        sys.exit(0)\n"
    )
    result = invoke("a_refusing_target:Mine")
    assert_ended(result, 2, "ended the process with 0", "in refuses")
    assert "click" not in result.output


def test_rank_that_dies_on_real_processes_costs_its_case(tmp_path, monkeypatch):
    """Each rank imports the target; the one that dies is named with its exit status."""
    monkeypatch.chdir(tmp_path)
    parts = '[system]\nstage = 0\n[world]\nsize = 2\n[matrix]\n"run.seed" = [1, 2]\n'
    Path("cases.toml").write_text(SCENARIO + parts)
    wrong = "if scenario.run.seed == 1 and group.rank() == 1: os._exit(7)"
    Path("a_target_on_gloo.py").write_text(
        MODULE.replace("next(module.parameters()).data[0] += 1", wrong)
        + "\n    numerics = find_target('torch-ddp').numerics\n"
        + "    capabilities = find_target('torch-ddp').capabilities\n"
    )
    command = ["run", "cases.toml", "--backend", "gloo", "--target", "a_target_on_gloo:Mine"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 1, result.output
    assert "world.rank-died: rank 1: its process ended with exit status 7" in result.output
    assert "2 cases: 1 passed, 1 failed" in result.output
    assert "--target a_target_on_gloo:Mine --backend gloo" in result.output


LIBRARY_CASE = SCENARIO + '[system]\ntarget = "deepspeed-zero-1"\n'


@pytest.fixture
def without_libraries(monkeypatch):
    monkeypatch.setattr("zero_sim.targets.rank_local._is_installed", lambda package: False)


@pytest.mark.usefixtures("without_libraries")
def test_case_without_its_library_is_omitted_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("theirs.toml").write_text(LIBRARY_CASE)
    Path("ours.toml").write_text(SCENARIO)
    ran = CliRunner().invoke(main, ["run", ".", "--no-bundles"])
    assert_ended(ran, 0, "1 passed", 'Try `pip install "zero-sim[deepspeed]"`', on="stdout")


@pytest.mark.usefixtures("without_libraries")
def test_requested_target_without_its_library_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("ours.toml").write_text(SCENARIO)
    ran = CliRunner().invoke(main, ["run", ".", "--no-bundles", "--target", "deepspeed-zero-1"])
    assert_ended(ran, 4, "needs the package 'deepspeed', which is not installed")


class TestByParamsOnly:
    """Targets that report neither averaged gradients nor optimizer state."""

    CASE = """schema = 1
[model]
name = "params"
shapes = [[3], [5]]
[world]
size = 3
[system]
stage = 0
"""

    @pytest.fixture
    def judged(self, tmp_path, monkeypatch):
        """Judge a class of `tests.run.summing`."""
        (tmp_path / "case.toml").write_text(self.CASE)
        monkeypatch.chdir(tmp_path)
        command = ["run", "case.toml", "--target"]
        return lambda name, *more: CliRunner().invoke(
            main, [*command, f"tests.run.summing:{name}", *more]
        )

    def test_pass_by_params_only_is_printed(self, judged):
        done = judged("UndividedAdam")
        assert done.exit_code == 0
        assert done.output.startswith("PASS (params only) case ")
        assert "1 passed (1 by params only) in " in done.output

    def test_json_and_junit_have_the_scope(self, judged):
        (case,) = json.loads(judged("UndividedAdam", "--json", "--junit", "j.xml").stdout)["cases"]
        assert (case["verdict"], case["scope"]) == ("pass", "params-only")
        assert '<property name="scope" value="params-only" />' in Path("j.xml").read_text()

    @pytest.mark.parametrize("label", ["reproduce", "replay"])
    def test_printed_commands_repeat_a_finding_of_sgd(self, judged, label):
        done = judged("Undivided")
        (line,) = [line for line in done.output.splitlines() if line.startswith(f"  {label}: ")]
        again = CliRunner().invoke(main, shlex.split(line.partition(": ")[2])[1:])
        assert (done.exit_code, again.exit_code) == (1, 1)
        assert "found with SGD in place of AdamW" in done.output
        assert "equality.params" in again.output

    def test_printed_case_is_that_of_sgd(self, judged):
        assert '    name = "sgd"\n    lr = 1.0\n' in judged("Undivided").output

    def test_inferred_rule_is_printed_once(self, judged):
        Path("case.toml").write_text(f"{self.CASE}[matrix]\n'run.seed' = [0, 1]\n")
        done = judged("ShowsMeans")
        assert done.exit_code == 0
        assert done.output.count("not declared, so taken: reported_grads = 'after-division'") == 1
