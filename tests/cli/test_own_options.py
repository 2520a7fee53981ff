"""`--option name=value`: options of a target in run, replay, shrink and fuzz."""

import json
import shlex

import pytest
from click.testing import CliRunner

from zero_sim.cli.main import main

CASE = """schema = 1
[model]
name = "params"
shapes = [[3]]
[world]
size = 2
[system]
stage = 0
[run]
steps = 1
"""
TARGET = ["--target", "tests.targets.test_options:Opted"]
WRONG = ["--option", "wrong by=2.0"]


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    (tmp_path / "case.toml").write_text(CASE)
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(main, [*words, *TARGET])


def said(done, label):
    (line,) = [line for line in done.output.splitlines() if line.startswith(f"  {label}: ")]
    return shlex.split(line.removeprefix(f"  {label}: "))[1:]


def test_option_is_set_and_part_of_printed_commands(invoke):
    assert invoke("run", "case.toml").exit_code == 0
    wrong = invoke("run", "case.toml", *WRONG)
    assert wrong.exit_code == 1, wrong.output
    assert CliRunner().invoke(main, said(wrong, "reproduce")).exit_code == 1
    replay = said(wrong, "replay")
    assert CliRunner().invoke(main, replay).exit_code == 1
    assert CliRunner().invoke(main, [*replay, "--option", "wrong by=1.0"]).exit_code == 0


def test_shrunk_case_keeps_the_needed_option(invoke):
    done = invoke("shrink", "case.toml", *WRONG, "--option", "fast=true")
    assert done.exit_code == 1, done.output
    assert "wrong by" in done.output
    assert "fast" not in done.output


def test_all_cases_of_a_campaign_have_the_option(invoke):
    done = invoke("fuzz", "--cases", "2", "--jobs", "1", "--json", *WRONG)
    assert done.exit_code == 1, done.output
    assert json.loads(done.stdout)["cases"] == 2


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("wrong by", "expected --option NAME=VALUE, got 'wrong by'"),
        ("colou=red", "Try 'colour'"),
        ("fast=1", "expected true or false, got '1'"),
    ],
)
def test_invalid_option_is_refused(invoke, option, words):
    done = invoke("run", "case.toml", "--option", option)
    assert done.exit_code == 2
    assert words in done.output
