"""`zero-sim mutants`: each mutant in a line, then the score."""

import json

from click.testing import CliRunner

from zero_sim.cli import main


def invoke(*arguments):
    return CliRunner().invoke(main, ["mutants", *arguments])


def test_one_that_is_found():
    result = invoke("M05", "--cases", "40", "--jobs", "1")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("M05   LAYOUT  killed by ")
    assert result.stdout.splitlines()[-1].startswith("1 of 1 mutants killed in ")


def test_one_that_survives_is_described():
    result = invoke("M95", "--cases", "1", "--jobs", "1")
    assert result.exit_code == 1
    assert "M95   CKPT    SURVIVED after 1 case" in result.stdout
    assert "written as strings. [DeepSpeed#5342]" in result.stdout


def test_json_and_nothing_else():
    said = json.loads(invoke("M05", "--cases", "40", "--jobs", "1", "--json").stdout)
    assert said["all"] == {"name": "all", "killed": 1, "of": 1}
    assert said["trials"][0]["id"] == "M05"
    assert said["exit_status"] == 0


def test_what_is_not_known():
    result = invoke("M999")
    assert result.exit_code == 2
    assert "M999" in result.stderr


def test_nothing_selected():
    assert invoke("M73", "--class", "CKPT").exit_code == 5
