"""The GitHub action: its schema and the scripts of its steps."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[2]
ACTION = YAML(typ="safe").load((ROOT / "action.yml").read_text())
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"]}


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ("vendor.github-actions", "action.yml"),
        ("vendor.github-workflows", ".github/workflows/zero-sim.yml"),
    ],
)
def test_files_fit_the_schemas_of_github(schema, path):
    checked = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, ROOT / path],
        capture_output=True, text=True,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout


def test_workflow_passes_known_inputs():
    workflow = YAML(typ="safe").load((ROOT / ".github/workflows/zero-sim.yml").read_text())
    *_, step = workflow["jobs"]["judge"]["steps"]
    assert step["uses"] == "./"
    assert set(step["with"]) <= set(ACTION["inputs"])


@pytest.fixture
def run_step(tmp_path):
    """Run the script of a step in an empty folder, as a runner does."""

    def run(name, **given):
        inputs = {key: value["default"] for key, value in ACTION["inputs"].items()}
        inputs |= {key.replace("_", "-"): value for key, value in given.items()}
        env = {
            variable: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda m: inputs[m[1]], value)
            for variable, value in STEPS[name].get("env", {}).items()
        }
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        # GitHub's options of bash.
        script = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", STEPS[name]["run"]]
        return subprocess.run(
            script, cwd=tmp_path, env={**os.environ, **env, "PATH": path},
            capture_output=True, text=True,
        )  # fmt: skip

    return run


def test_scenarios_step_writes_junit_results(run_step, tmp_path):
    scenario = ROOT / "scenarios/smoke/transformer-260.toml"
    ended = run_step("Scenarios", scenarios=str(scenario), jobs="1")
    assert ended.returncode == 0, ended.stderr
    assert "<testsuite" in (tmp_path / "zero-sim.xml").read_text()


def test_failing_case_fails_the_job_and_is_reported(run_step, tmp_path):
    path = ROOT / "scenarios/faults/gradients.toml"
    # Without the expected finding, the planned fault is a failure.
    text = re.sub(r"(?s)\[expect\]\n.*?\n\n", "", path.read_text())
    (tmp_path / "wrong.toml").write_text(text)
    ended = run_step("Scenarios", scenarios="wrong.toml", jobs="1")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert run_step("Report").returncode == 0
    assert (tmp_path / "zero-sim.html").exists()


def test_generated_cases_are_kept(run_step, tmp_path):
    ended = run_step("Generated cases", fuzz_seconds="2", jobs="1")
    assert ended.returncode in (0, 5), ended.stderr
    assert any((tmp_path / ".zero-sim/corpus/action").iterdir())
