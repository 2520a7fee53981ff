"""If a rule allows several results, the owner of an element decides its bits."""

from types import SimpleNamespace

import pytest
import torch

from zero_sim.judge.adopting import Adoption
from zero_sim.targets import OwnedPart, Place

HERE, THERE = {"": 1.0, "m": 5.0}, {"": 1.5, "m": 5.5}
"""Master and state of an element for two ways to cut its tensor."""


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


def test_bits_of_the_owner_are_adopted(source, adoption):
    adoption.see_part(part([1.0, 1.5], [5.0, 5.5]), STEP)
    assert source.adopted == [("w", [3], [1.5])]


@pytest.mark.parametrize(
    ("master", "state"),
    [([1.0, 1.5], [5.0, 5.0]), ([1.0, 1.0], [5.0, 5.5]), ([1.0, 1.25], [5.0, 5.0])],
)
def test_master_and_state_must_come_from_one_cut(source, adoption, master, state):
    adoption.see_part(part(master, state), STEP)
    assert source.adopted == []


def test_replica_is_checked_against_its_first_owner(source, adoption):
    adoption.see_part(part([1.0, 1.0], [5.0, 5.0]), STEP)
    adoption.see_part(part([1.0, 1.5], [5.0, 5.5]), STEP)
    assert source.adopted == []


def test_working_param_before_its_owner_is_adopted(source, adoption):
    adoption.see_param("w", torch.tensor([1.0, 1.0, 1.0, 1.5]), STEP)
    assert source.adopted == [("w", [3], [1.5])]


def test_owner_is_checked_against_an_earlier_working_param(source, adoption):
    adoption.see_param("w", torch.ones(4), STEP)
    adoption.see_part(part([1.0, 1.5], [5.0, 5.5]), STEP)
    assert source.adopted == []


def test_working_param_is_checked_against_the_owner(source, adoption):
    adoption.see_part(part([1.0, 1.0], [5.0, 5.0]), STEP)
    adoption.see_param("w", torch.tensor([1.0, 1.0, 1.0, 1.5]), STEP)
    assert source.adopted == []
