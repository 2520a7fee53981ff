"""The owner of an element decides its bits, where a rule gives several."""

from types import SimpleNamespace

import pytest
import torch

from zero_sim.judge.adopting import Adoption
from zero_sim.targets import OwnedPart, Place

HERE, THERE = {"": 1.0, "m": 5.0}, {"": 1.5, "m": 5.5}
"""Master and state of an element, by where its tensor is cut."""


class Source:
    has_own_rule = True
    uncertified_step = None

    def __init__(self):
        self.adopted = []
        self.reference = SimpleNamespace(cut_step=lambda expected, name: self)

    def bits_elsewhere(self, index, *, holds):
        for found in (HERE, THERE):
            values = {key: torch.full((index.numel(),), value) for key, value in found.items()}
            if holds(index, values).all():
                return values
        return None

    def adopt(self, step, name, index, values):
        self.adopted.append((name, index.tolist(), values[""].tolist()))


@pytest.fixture
def source():
    return Source()


@pytest.fixture
def adoption(source):
    return Adoption(source)


STEP = SimpleNamespace(
    step=0,
    skipped=False,
    masters={"w": torch.ones(4)},
    params={"w": torch.ones(4)},
    state={"w": {"m": torch.full((4,), 5.0)}},
)


def part(master, state, start=2):
    place = Place(param="w", start=start, stop=start + 2)
    return OwnedPart(
        place=place, grad=None, master=torch.tensor(master), state={"m": torch.tensor(state)}
    )


def test_the_owners_bits_are_adopted(source, adoption):
    adoption.see_part(part([1.0, 1.5], [5.0, 5.5]), STEP)
    assert source.adopted == [("w", [3], [1.5])]


@pytest.mark.parametrize(
    ("master", "state"),
    [([1.0, 1.5], [5.0, 5.0]), ([1.0, 1.0], [5.0, 5.5]), ([1.0, 1.25], [5.0, 5.0])],
)
def test_master_and_state_are_of_one_cut(source, adoption, master, state):
    adoption.see_part(part(master, state), STEP)
    assert source.adopted == []


def test_a_replica_is_held_to_what_its_first_owner_has(source, adoption):
    adoption.see_part(part([1.0, 1.0], [5.0, 5.0]), STEP)
    adoption.see_part(part([1.0, 1.5], [5.0, 5.5]), STEP)
    assert source.adopted == []


def test_a_working_param_may_be_seen_before_its_owner(source, adoption):
    adoption.see_param("w", torch.tensor([1.0, 1.0, 1.0, 1.5]), STEP)
    assert source.adopted == [("w", [3], [1.5])]


def test_an_owner_is_held_to_a_working_param_that_was_seen(source, adoption):
    adoption.see_param("w", torch.ones(4), STEP)
    adoption.see_part(part([1.0, 1.5], [5.0, 5.5]), STEP)
    assert source.adopted == []


def test_a_working_param_is_held_to_the_owner(source, adoption):
    adoption.see_part(part([1.0, 1.0], [5.0, 5.0]), STEP)
    adoption.see_param("w", torch.tensor([1.0, 1.0, 1.0, 1.5]), STEP)
    assert source.adopted == []
