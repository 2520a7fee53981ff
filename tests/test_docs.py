"""The pages in docs/ say what is so: fields, checks, forms and jobs are those that there are."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import click
import pytest
from click.testing import CliRunner

from zero_sim.cli.main import main
from zero_sim.reference import CLIP_FORMS
from zero_sim.report.explain import explain
from zero_sim.scenario import spec
from zero_sim.targets import Capabilities, Numerics

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
COMPARED = (DOCS / "what-is-compared.md").read_text()
TARGETS = (DOCS / "targets.md").read_text()
CI = (DOCS / "ci.md").read_text()

TABLES = {
    "model": spec.ModelSpec,
    "data": spec.DataSpec,
    "world": spec.WorldSpec,
    "topology": spec.TopologySpec,
    "system": spec.SystemSpec,
    "optimizer": spec.OptimizerSpec,
    "run": spec.RunSpec,
    "reload": spec.ReloadSpec,
    "faults": spec.FaultSpec,
}


@pytest.mark.parametrize("table", TABLES)
def test_the_features_of_a_case_are_all_fields_of_its_table(table):
    (row,) = re.findall(rf"^\| `{table}` \| (.*) \|$", COMPARED, flags=re.MULTILINE)
    fields = {field.name for field in dataclasses.fields(TABLES[table])}
    assert set(re.findall(r"`(\w+)`", row)) == fields - ({"target"} if table == "system" else set())


def test_counts_of_models_and_optimizers_are_right():
    counts = [int(n) for n in re.findall(r"`name` \((\d+) ", COMPARED)]
    assert counts == [len(get_args(spec.ModelName)), len(get_args(spec.OptimizerName))]


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda path: path.stem)
def test_every_check_that_a_page_names_is_one(page):
    for check in re.findall(
        r"`((?:equality|invariant|guard|world|input)\.[a-z-]+)`", page.read_text()
    ):
        if check.partition(".")[2].replace("-", "_") not in {
            field.name for field in dataclasses.fields(spec.WorldSpec)
        }:
            assert explain(check), check


@pytest.mark.parametrize("record", [Capabilities, Numerics], ids=lambda record: record.__name__)
def test_all_that_a_target_can_declare_is_told(record):
    missing = [f.name for f in dataclasses.fields(record) if f"`{f.name}`" not in TARGETS]
    assert not missing


def test_the_forms_of_clipping_that_are_named_exist():
    named = set(re.findall(r"`(fp(?:32|64)-[a-z-]+)`", TARGETS))
    assert named
    assert named <= set(CLIP_FORMS)
    assert f"{_in_words(len(CLIP_FORMS))} forms" in TARGETS


def _in_words(count):
    return {16: "sixteen"}[count]


JOBS = dict(
    zip(("github", "gitlab"), re.findall(r"```yaml\n(.*?)```", CI, flags=re.DOTALL), strict=True)
)
SCHEMAS = {"github": "vendor.github-workflows", "gitlab": "vendor.gitlab-ci"}


@pytest.mark.parametrize("service", JOBS)
def test_a_job_fits_the_schema_of_its_service(service, tmp_path):
    pytest.importorskip("check_jsonschema")
    path = tmp_path / "job.yml"
    path.write_text(JOBS[service])
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", SCHEMAS[service]]
    if service == "gitlab":
        command += ["--data-transform", "gitlab-ci"]
    done = subprocess.run([*command, "-o", "json", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, json.dumps(done.stdout) + done.stderr


@pytest.mark.parametrize("service", JOBS)
def test_the_commands_of_a_job_are_commands_of_ours(service):
    lines = re.findall(r"zero-sim (\w+)((?: [^\s|']+)*)", JOBS[service])
    lines = [(name, words.split()) for name, words in lines if name in main.commands]
    assert {name for name, _ in lines} == {"run", "fuzz", "report"}
    for name, words in lines:
        options = {
            option
            for param in main.commands[name].params
            if isinstance(param, click.Option)
            for option in param.opts
        }
        assert {word for word in words if word.startswith("--")} <= options


SCRIPTS = (DOCS / "scripts.md").read_text()


def test_every_option_of_torchrun_that_a_page_names_is_one():
    options = {option for param in main.commands["torchrun"].params for option in param.opts}
    # `--steps` is the script's.
    assert set(re.findall(r"--[a-z][a-z-]+", SCRIPTS)) - {"--steps"} <= options


def test_the_script_of_a_page_runs_by_the_commands_that_the_page_gives(tmp_path, monkeypatch):
    # The packages that it names are somebody's own.
    commands = [
        line
        for line in re.findall(r"^zero-sim (torchrun .*)", SCRIPTS, flags=re.MULTILINE)
        if "accelerate" not in line
    ]
    (script,) = re.findall(r"```python\n(.*?)```", SCRIPTS, flags=re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    assert len(commands) == 2
    for command in commands:
        done = CliRunner().invoke(main, command.split())
        assert done.exit_code == 0, done.output
        assert "step 1 loss" in done.output
