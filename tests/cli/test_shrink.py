"""`zero-sim shrink`: from a failing file or bundle to the smallest case with the same finding."""

import json
import re
import shlex
from pathlib import Path

import pytest

from zero_sim.scenario.load import load_scenario

AMPLE = 3600.0
"""Seconds for a search that must finish even on a busy machine."""
LEAST = "2 ranks, 1 param, 1 element, 1 step, 0 features"
"""On one rank, a missing division by the number of ranks has no effect."""


@pytest.fixture
def done(invoke, broken):
    """Result of shrinking a file with a system that does not divide."""
    broken(True)
    return invoke("shrink", "one.toml", "--output", "small.toml", "--seconds", AMPLE)


def test_finding_and_smallest_size_are_printed(done):
    assert done.exit_code == 1, done.output
    assert done.stdout.startswith("FAIL  2-ranks-1-param-1-element-1-step ")
    assert f"  smallest    {LEAST}; " in done.stdout


def test_shrunk_case_is_a_scenario_file(done):
    text = Path("small.toml").read_text()
    assert done.stdout.endswith(f"\n\n{text}")
    assert load_scenario("small.toml").model.shapes == ((1,),)


def test_printed_replay_command_works(done, invoke):
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("  replay: ")]
    again = invoke(*shlex.split(line.removeprefix("  replay: "))[1:])
    assert (again.exit_code, again.stdout.split()[0]) == (1, "FAILED")


def test_bundle_is_shrunk_by_its_id(bundle, invoke, broken):
    broken(True)
    replayed = json.loads(invoke("replay", bundle, "--json").stdout)
    told = json.loads(invoke("shrink", bundle[:6], "--json", "--seconds", AMPLE).stdout)
    assert told["before"]["ranks"] == 3
    assert told["after"] == {"ranks": 2, "params": 1, "elements": 1, "steps": 1, "features": 0}
    assert told["complete"] is True
    assert told["result"]["findings"][0]["check"] == replayed["then"]["check"]
    assert Path(".zero-sim/bundles", told["bundle"], "case.toml").exists()


def test_reached_limit_is_printed(invoke, broken):
    broken(True)
    done = invoke("shrink", "one.toml", "--seconds", "1e-9")
    assert re.search(r"; 0 cases, \d+\.\d s; stopped by the limit on time", done.stdout)


def test_passing_case_is_not_shrunk(invoke):
    done = invoke("shrink", "one.toml")
    assert (done.exit_code, done.stdout.split()[0]) == (0, "PASS")
    assert not Path(".zero-sim").exists()


def test_case_that_ends_in_an_error_is_not_shrunk(invoke):
    with Path("one.toml").open("a") as file:
        file.write("[data.nan]\nstep = 0\nrank = 1\n")
    done = invoke("shrink", "one.toml")
    assert (done.exit_code, done.stdout.split()[0]) == (2, "ERROR"), done.output


def test_file_of_several_cases_needs_a_selection(invoke):
    done = invoke("shrink", "several.toml")
    assert done.exit_code == 2
    assert "expected one case to shrink, got 2 (several/seed=1, several/seed=2)" in done.stderr
    assert invoke("shrink", "several.toml", "-k", "seed=2").exit_code == 0


def test_expectation_on_accuracy_is_not_shrunk(invoke):
    """A smaller case could miss the accuracy because of its size."""
    floor = "[optimizer]\nlr = 1e-9\n[expect]\naccuracy_min = 0.99\n"
    Path("floor.toml").write_text(f'schema = 1\n[model]\nname = "digits"\nhidden = 8\n{floor}')
    done = invoke("shrink", "floor.toml")
    assert done.exit_code == 2
    assert "got expect.accuracy, which depends on this case's size" in done.stderr


def test_unwritable_output_prints_the_case(invoke, broken):
    broken(True)
    Path("taken").touch()
    done = invoke("shrink", "one.toml", "--bundles", "taken/b", "--output", "taken/small.toml")
    assert done.exit_code == 2
    assert "No bundle in taken/b: Not a directory." in done.stderr
    assert "expected to write a scenario to taken/small.toml, got: Not a directory." in done.stderr
    assert "\nschema = 1\n" in done.stdout
