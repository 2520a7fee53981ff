"""Families: other systems for the same model, data and optimizer, with the same expected
results.
"""

from dataclasses import replace
from itertools import islice

import pytest

from zero_sim.fuzz.drawing import draws
from zero_sim.fuzz.families import EFFORT_OF_A_FAMILY, has_family, siblings
from zero_sim.fuzz.strategies import drawn_cases
from zero_sim.reference import computed_from
from zero_sim.scenario.rules import check_scenario
from zero_sim.scenario.spec import ModelSpec, ReloadSpec, RunSpec, Scenario, WorldSpec
from zero_sim.targets import find_target, refusals

CHEAP = Scenario(
    schema=1,
    model=ModelSpec(name="params", shapes=((4,), (3,))),
    world=WorldSpec(size=2),
    run=RunSpec(steps=2),
)


@pytest.mark.parametrize("name", ["zero_sim", "torch-ddp", "torch-fsdp2"])
def test_family_members_are_valid_and_share_their_reference(name):
    target = find_target(name)
    met = 0
    for index, first in enumerate(islice(draws(drawn_cases(target), seed="family"), 40)):
        if not has_family(first):
            continue
        others = list(siblings(first, target=target, most=6, seed=f"family/{index}"))
        assert len({first, *others}) == 1 + len(others) <= 6
        for other in others:
            assert computed_from(other) == computed_from(first)
            assert not check_scenario(other)
            assert not refusals(target, other)
        met += len(others)
    assert met >= 40


def test_members_are_determined_by_the_seed():
    target = find_target("zero_sim")
    one, two, three = (
        list(siblings(CHEAP, target=target, most=8, seed=seed)) for seed in ("a", "a", "d")
    )
    assert one == two != three
    assert len(one) == 7
    assert {each.system.stage for each in one + three} == {0, 1, 2, 3}


def test_expensive_case_has_a_small_family():
    target = find_target("zero_sim")
    dear = replace(CHEAP, world=WorldSpec(size=8), run=RunSpec(steps=20))
    assert len(list(siblings(dear, target=target, most=16, seed=""))) <= 3
    assert len(list(siblings(dear, target=target, most=256, seed=""))) > 3
    endless = replace(CHEAP, run=RunSpec(steps=EFFORT_OF_A_FAMILY))
    assert not list(siblings(endless, target=target, most=16, seed=""))


def test_common_change_is_applied_to_members():
    target = find_target("zero_sim")

    def whole(case):
        return replace(case, world=replace(case.world, timing="eager", races=False))

    few = list(siblings(CHEAP, target=target, most=8, seed="", then=whole))
    assert len(few) >= 4
    assert {(each.world.timing, each.world.races) for each in few} == {("eager", False)}


@pytest.mark.parametrize(
    "other",
    [
        {"reload": ReloadSpec(step=1)},
        {"world": WorldSpec(order="ring")},
        {"world": WorldSpec(order="tree", order_known=False)},
    ],
    ids=str,
)
def test_some_cases_have_no_family(other):
    assert has_family(CHEAP)
    assert not has_family(replace(CHEAP, **other))
