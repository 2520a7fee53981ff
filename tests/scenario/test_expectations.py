"""Rules for planned faults and expected findings, and their form in a file."""

import dataclasses

import pytest

from zero_sim.errors import ScenarioError
from zero_sim.scenario import ExpectSpec, FaultSpec, ModelSpec, Scenario, WorldSpec
from zero_sim.scenario.load import parse_cases
from zero_sim.scenario.rules import check_scenario
from zero_sim.scenario.spec import CollectiveName, FaultName, ReloadSpec, RunSpec

CASE = Scenario(schema=1, model=ModelSpec(name="mlp"), world=WorldSpec(size=3))
HEAD = 'schema = 1\n[model]\nname = "mlp"\n'


def load(text):
    """Return the cases of a file with a model."""
    return parse_cases(HEAD + text, source="file.toml", stem="file")


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("faults[0].rank", FaultSpec(kind="drop", rank=3)),
        ("faults[0].rank", FaultSpec(kind="drop", rank=-1)),
        ("faults[0].call", FaultSpec(kind="drop", rank=0, call=-1)),
        ("faults[0].call_stop", FaultSpec(kind="drop", rank=0, at="random")),
        ("faults[0].call_stop", FaultSpec(kind="drop", rank=0, at="random", call=3, call_stop=3)),
        ("faults[0].call_stop", FaultSpec(kind="drop", rank=0, call_stop=3)),
        ("faults[0].side", FaultSpec(kind="drop", rank=0, side="receive")),
        ("faults[0].element", FaultSpec(kind="crash", rank=0, element=1)),
        ("faults[0].element", FaultSpec(kind="corrupt", rank=0, element=-1)),
        ("faults[0].bit", FaultSpec(kind="stall", rank=0, bit=1)),
        ("faults[0].bit", FaultSpec(kind="corrupt", rank=0, bit=64)),
        ("faults[0].call", FaultSpec(kind="slow", rank=0, call=1)),
        ("faults[0].at", FaultSpec(kind="slow", rank=0, at="random")),
        ("faults[0].collective", FaultSpec(kind="slow", rank=0, collective="barrier")),
    ],
)
def test_one_broken_rule_is_one_problem(path, fault):
    problems = check_scenario(dataclasses.replace(CASE, faults=(fault,)))
    assert [problem.path for problem in problems] == [path]
    assert problems[0].suggestion


@pytest.mark.parametrize(
    "fault",
    [
        FaultSpec(kind="drop", rank=2, call=1000),
        FaultSpec(kind="corrupt", rank=0, side="receive", element=0, bit=63),
        FaultSpec(kind="stall", rank=0, at="random", call=2, call_stop=3, collective="all_reduce"),
        FaultSpec(kind="slow", rank=0),
    ],
)
def test_extreme_faults_are_accepted(fault):
    assert check_scenario(dataclasses.replace(CASE, faults=(fault,))) == []


def test_faults_with_a_reload_are_refused():
    """It would be unclear which world's calls count."""
    faults = (FaultSpec(kind="drop", rank=0),)
    (problem,) = check_scenario(dataclasses.replace(CASE, faults=faults, reload=ReloadSpec(step=1)))
    assert problem.path == "faults"


@pytest.mark.parametrize("wanted", ["equality.grad", "equality", "world.stalled-by-plan"])
def test_names_of_checks_are_accepted(wanted):
    expect = ExpectSpec(finding=wanted)
    assert check_scenario(dataclasses.replace(CASE, expect=expect)) == []


@pytest.mark.parametrize("wanted", ["", "equality.", "a b", "a.b.c", "zzz", "equality.nothing"])
def test_other_names_are_refused(wanted):
    (problem,) = check_scenario(dataclasses.replace(CASE, expect=ExpectSpec(finding=wanted)))
    assert problem.path == "expect.finding"
    assert "equality.grad, equality.norm" in problem.message


@pytest.mark.parametrize(
    ("wanted", "meant"), [("equality.gard", "equality.grad"), ("World", "world")]
)
def test_similar_check_is_suggested(wanted, meant):
    (problem,) = check_scenario(dataclasses.replace(CASE, expect=ExpectSpec(finding=wanted)))
    assert problem.suggestion == f"Did you mean '{meant}'?"


def test_file_lists_faults_as_tables():
    (case,) = load('[[faults]]\nkind = "drop"\nrank = 1\n[[faults]]\nkind = "slow"\nrank = 0\n')
    assert case.faults == (FaultSpec(kind="drop", rank=1), FaultSpec(kind="slow", rank=0))


def test_matrix_varies_the_whole_plan():
    first, second = load(
        '[matrix]\nfaults = [[{kind = "drop", rank = 1}], [{kind = "crash", rank = 0}]]\n'
    )
    assert first.name == "file/faults=kind:drop+rank:1"
    assert second.name == "file/faults=kind:crash+rank:0"
    assert second.faults == (FaultSpec(kind="crash", rank=0),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[faults]]\nkind = "melt"\nrank = 0', "faults[0].kind: expected one of 'crash'"),
        ('[[faults]]\nkind = "drop"', "faults[0].rank: missing; expected an integer"),
        ('[[faults]]\nkind = "drop"\nrank = 0\nrnak = 1', "Did you mean `rank`?"),
        ("faults = 3", "faults: expected an array of tables, got 3 (integer)"),
    ],
)
def test_mistakes_in_a_file_are_reported(text, message):
    text = HEAD.replace("[model]", f"{text}\n[model]") if text.startswith("faults") else HEAD + text
    with pytest.raises(ScenarioError) as refused:
        parse_cases(text, source="file.toml", stem="file")
    assert message in str(refused.value)


def test_names_equal_those_of_the_simulator():
    """Both layers define them, because `scenario` does not import `sim`."""
    from typing import get_args

    from zero_sim.sim.call import SPARSE
    from zero_sim.sim.comm.collectives import PERFORM
    from zero_sim.sim.faults import FaultKind

    assert set(get_args(CollectiveName)) == set(PERFORM) - {SPARSE, "send"}  # of two ranks
    assert get_args(FaultName) == get_args(FaultKind)


def test_every_field_of_a_fault_reaches_the_world():
    from zero_sim.backends.worlds import WorldPool
    from zero_sim.sim import Fault

    spec = FaultSpec(
        kind="corrupt", rank=1, call=2, at="random", call_stop=4, collective="all_gather",
        side="receive", element=5, bit=6,
    )  # fmt: skip
    with WorldPool() as pool:
        world = pool.world_for(dataclasses.replace(CASE, faults=(spec,)))
        assert world.settings.faults == (Fault(**dataclasses.asdict(spec)),)
        assert pool.world_for(CASE).settings.faults == ()


def test_each_case_has_its_own_stall_limit():
    """Although the world is reused."""
    from zero_sim.backends.worlds import WorldPool

    with WorldPool() as pool:
        short = dataclasses.replace(CASE, run=RunSpec(stall_seconds=2.5))
        assert pool.world_for(short).settings.stall_seconds == 2.5
        assert pool.world_for(CASE).settings.stall_seconds == 60.0


def test_maximum_world_size_equals_that_of_the_simulator():
    """Both layers define it, because `scenario` does not import `sim`."""
    from zero_sim.scenario import rules
    from zero_sim.sim.world import settings

    assert rules.WORLD_SIZE_MAX == settings.WORLD_SIZE_MAX
