"""A param is found by its name in the bare model, whatever a wrapper adds to that."""

import pytest

from zero_sim.targets.wrapped_names import names_like


@pytest.mark.parametrize(
    "own", ["up.weight", "module.up.weight", "up._fsdp_wrapped_module.weight", "a.up.b.weight"]
)
def test_parts_may_be_added_in_front_and_within(own):
    assert names_like([own, "up.bias"], "up.weight") == [own]


def test_a_name_that_is_there_is_the_only_one():
    assert names_like(["weight", "head.weight"], "weight") == ["weight"]


@pytest.mark.parametrize("other", ["weight.up", "up.weight.scale", "weight"])
def test_what_lacks_a_part_or_ends_otherwise_is_another_param(other):
    assert names_like([other], "up.weight") == []


def test_all_that_may_be_meant_are_given():
    assert names_like(["a.weight", "b.weight"], "weight") == ["a.weight", "b.weight"]
