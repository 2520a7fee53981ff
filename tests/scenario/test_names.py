"""Names of params in a scenario must be those of trained params."""

import pytest

from zero_sim.scenario.names import check_names, matching_groups, with_known_names
from zero_sim.scenario.spec import (
    FreezeSpec,
    ModelSpec,
    OptimizerSpec,
    ParamGroupSpec,
    Scenario,
    TopologySpec,
)

NAMES = ["up.weight", "up.bias", "down.weight"]


def groups(*endings):
    return tuple(ParamGroupSpec(match=ending, lr=0.5) for ending in endings)


def case(*, freeze=(), optimizer=(), shared=(), tied=()):
    spans = tuple(FreezeSpec(param=name, start=0, stop=1) for name in freeze)
    return Scenario(
        schema=1,
        model=ModelSpec(name="mlp", freeze=spans),
        optimizer=OptimizerSpec(groups=groups(*optimizer)),
        topology=TopologySpec(tp=2, pp=2, shared=shared, tied=tied),
    )


KNOWN = case(freeze=["up.bias"], optimizer=["up.bias", "weight"], shared=("bias",), tied=("ht",))
UNKNOWN = {
    "model.freeze[1].param": case(freeze=["up.bias", "bias"]),
    "optimizer.groups[1].match": case(optimizer=["bias", "gamma"]),
    "topology.shared[0]": case(shared=("nobody", "bias")),
    "topology.tied[1]": case(tied=("bias", "nobody")),
}


def test_known_names_are_accepted_and_kept():
    assert list(check_names(KNOWN, NAMES)) == []
    assert with_known_names(KNOWN, NAMES) == KNOWN


@pytest.mark.parametrize("path", UNKNOWN)
def test_unknown_name_is_reported_with_its_path_and_known_names(path):
    (problem,) = check_names(UNKNOWN[path], NAMES)
    assert problem.path == path
    assert "up.weight" in problem.suggestion


@pytest.mark.parametrize("path", UNKNOWN)
def test_repair_removes_unknown_names(path):
    assert list(check_names(with_known_names(UNKNOWN[path], NAMES), NAMES)) == []


def test_group_covered_by_earlier_groups_is_reported():
    (problem,) = check_names(case(optimizer=["bias", "up.bias"]), NAMES)
    assert problem.path == "optimizer.groups[1].match"
    assert "earlier groups have all matches" in problem.message
    assert problem.suggestion.endswith("one of up.weight, down.weight.")


def test_no_name_is_suggested_if_every_param_has_a_group():
    (problem,) = check_names(case(optimizer=["", "bias"]), NAMES)
    assert problem.suggestion == "Leave the group out."


def test_groups_with_a_param_are_kept_in_order():
    found = matching_groups(groups("gamma", "weight", "up.weight", "bias"), NAMES)
    assert found == groups("weight", "bias")


def test_only_the_first_of_many_names_are_listed():
    names = [f"p{index}" for index in range(40)]
    (problem,) = check_names(case(tied=("nobody",)), names)
    assert problem.suggestion.endswith("p10, p11 and 28 more.")
