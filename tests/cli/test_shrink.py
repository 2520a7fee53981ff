"""`zero-sim shrink`: from a failing file or bundle to the smallest case with the same finding."""

import json
import re
import shlex
from pathlib import Path

import pytest

from zero_sim.scenario.load import load_scenario

AMPLE = 3600.0
"""Seconds for a search that is to come to its end on a busy machine, too."""
LEAST = "2 ranks, 1 param, 1 element, 1 step, 0 features"
"""On one rank a mean over ranks divides nothing."""


@pytest.fixture
def done(invoke, broken):
    """What is said of a file, of a system that does not divide."""
    broken(True)
    return invoke("shrink", "one.toml", "--output", "small.toml", "--seconds", AMPLE)


def test_it_says_what_is_wrong_and_how_small_it_is(done):
    assert done.exit_code == 1, done.output
    assert done.stdout.startswith("FAIL  2-ranks-1-param-1-element-1-step ")
    assert f"  smallest    {LEAST}; " in done.stdout


def test_the_smaller_case_is_a_scenario_file(done):
    text = Path("small.toml").read_text()
    assert done.stdout.endswith(f"\n\n{text}")
    assert load_scenario("small.toml").model.shapes == ((1,),)


def test_the_line_that_replays_it_works(done, invoke):
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("  replay: ")]
    again = invoke(*shlex.split(line.removeprefix("  replay: "))[1:])
    assert (again.exit_code, again.stdout.split()[0]) == (1, "FAILED")


def test_a_bundle_shrinks_by_its_id(bundle, invoke, broken):
    broken(True)
    replayed = json.loads(invoke("replay", bundle, "--json").stdout)
    told = json.loads(invoke("shrink", bundle[:6], "--json", "--seconds", AMPLE).stdout)
    assert told["before"]["ranks"] == 3
    assert told["after"] == {"ranks": 2, "params": 1, "elements": 1, "steps": 1, "features": 0}
    assert told["complete"] is True
    assert told["result"]["findings"][0]["check"] == replayed["then"]["check"]
    assert Path(".zero-sim/bundles", told["bundle"], "case.toml").exists()


def test_a_limit_is_said(invoke, broken):
    broken(True)
    done = invoke("shrink", "one.toml", "--seconds", "1e-9")
    assert re.search(r"; 0 cases, \d+\.\d s; stopped by the limit on time", done.stdout)


def test_a_case_that_passes_is_not_shrunk(invoke):
    done = invoke("shrink", "one.toml")
    assert (done.exit_code, done.stdout.split()[0]) == (0, "PASS")
    assert not Path(".zero-sim").exists()


def test_a_case_that_cannot_be_judged_is_not_shrunk(invoke):
    with Path("one.toml").open("a") as file:
        file.write("[data.nan]\nstep = 0\nrank = 1\n")
    done = invoke("shrink", "one.toml")
    assert (done.exit_code, done.stdout.split()[0]) == (2, "ERROR"), done.output


def test_a_file_of_several_cases_needs_one_chosen(invoke):
    done = invoke("shrink", "several.toml")
    assert done.exit_code == 2
    assert "expected one case to shrink, got 2 (several/seed=1, several/seed=2)" in done.stderr
    assert invoke("shrink", "several.toml", "-k", "seed=2").exit_code == 0


def test_what_a_case_expects_at_its_size_is_not_shrunk(invoke):
    """A smaller one would miss it for being smaller."""
    floor = "[optimizer]\nlr = 1e-9\n[expect]\naccuracy_min = 0.99\n"
    Path("floor.toml").write_text(f'schema = 1\n[model]\nname = "digits"\nhidden = 8\n{floor}')
    done = invoke("shrink", "floor.toml")
    assert done.exit_code == 2
    assert "got expect.accuracy, which is about what this case expects" in done.stderr


def test_a_place_that_is_not_there_costs_nothing_of_what_was_found(invoke, broken):
    broken(True)
    Path("taken").touch()
    done = invoke("shrink", "one.toml", "--bundles", "taken/b", "--output", "taken/small.toml")
    assert done.exit_code == 2
    assert "No bundle in taken/b: Not a directory." in done.stderr
    assert "expected to write a scenario to taken/small.toml, got: Not a directory." in done.stderr
    assert "\nschema = 1\n" in done.stdout
