"""Findings of an earlier run, judged again by the current code."""

from dataclasses import replace

from tests.fuzz.broken import Broken
from zero_sim import run_case
from zero_sim.fuzz.known import recheck
from zero_sim.fuzz.records import Found
from zero_sim.scenario.load import parse_cases
from zero_sim.shrink import Key, key_of

CASE = """schema = 1
[model]
name = "params"
shapes = [[3]]
[world]
size = 2
"""
FOUND = Found(
    key=Key("equality.master", "optimizer", "dense", "values"), message="differs", seed=5, case=3,
    scenario=CASE, bundle="", text="FAIL", size="small",
)  # fmt: skip


def outcome(found, target):
    (one,) = recheck([found], target=target)
    return one.outcome, one.reason


def test_case_that_passes_is_fixed():
    assert outcome(FOUND, "zero_sim") == ("fixed", "")


def test_case_with_the_same_finding_fails():
    (scenario,) = parse_cases(CASE, source="", stem="")
    key = key_of(run_case(scenario, target=Broken()))
    assert key is not None
    assert outcome(replace(FOUND, key=key), "tests.fuzz.broken:Broken") == ("fails", "")


def test_case_with_another_finding_reports_it():
    what, said = outcome(FOUND, "tests.fuzz.broken:Raising")
    assert what == "fails-otherwise"
    assert said.startswith("world.rank-failed: rank 0 raised RuntimeError: not today")


def test_case_that_is_refused_is_not_fixed():
    wide = replace(FOUND, scenario=CASE + "[system]\nstage = 3\n")
    what, said = outcome(wide, "torch-ddp")
    assert what == "unknown"
    assert "system.stage" in said


def test_finding_without_a_case_is_skipped():
    assert not list(recheck([replace(FOUND, scenario="")], target="no-such-target"))
