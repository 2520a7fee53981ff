"""Ranks with different start values: the system must spread those of the first holder."""

import json

import pytest

from zero_sim import run_case
from zero_sim.judge.facts import Facts
from zero_sim.judge.ownership import check_start
from zero_sim.mutants import find_mutants
from zero_sim.scenario.spec import ModelSpec, RunSpec, Scenario, WorldSpec


def case_of(name, *, distinct_start=True):
    model = ModelSpec(name=name, hidden=2, distinct_start=distinct_start)
    return Scenario(schema=1, model=model, world=WorldSpec(size=3), run=RunSpec(steps=2))


def begun_apart(mutant_id, name):
    (mutant,) = find_mutants([mutant_id])
    with mutant.apply():
        return run_case(case_of(name)).findings[0]


@pytest.mark.parametrize("name", ["mlp", "fp8", "unusual"])
def test_own_system_spreads_start_values(name):
    assert run_case(case_of(name)).verdict == "pass"


def test_param_that_was_not_spread_is_named():
    found = begun_apart("G05", "mlp")
    assert (found.check, found.step, found.rank) == ("invariant.start", 0, 1)
    assert found.param == "0.up.weight"
    assert "than rank 0" in found.message


def test_frozen_param_that_was_not_spread_is_named():
    assert begun_apart("G06", "unusual").param == "frozen"


def test_equal_start_values_need_no_spreading():
    (mutant,) = find_mutants(["G05"])
    with mutant.apply():
        assert run_case(case_of("mlp", distinct_start=False)).verdict == "pass"


def test_ranks_with_different_params_are_compared_by_name():
    starts = {0: {"a": "1", "b": "2"}, 1: {"a": "1", "c": "3"}, 2: {"b": "4", "c": "3"}}
    (found,) = check_start(starts, step=0)
    assert (found.rank, found.param) == (2, "b")


def test_start_values_survive_the_wire_between_processes():
    facts = Facts(places=(), addresses={}, shapes={}, start={"a": "1"})
    assert Facts.from_dict(json.loads(json.dumps(facts.as_dict()))) == facts
