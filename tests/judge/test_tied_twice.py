"""Engines that have a tied param twice: a finding, unless both are one tensor."""

from __future__ import annotations

import pytest
from torch import nn

from tests.judge.by_owner import OwnerEngine, judge, target
from zero_sim.scenario.spec import ModelSpec, WorldSpec
from zero_sim.targets.bare_model import model_of

TIED = ModelSpec(name="params", shapes=((5,), (2, 3), (4,)), tied=("p2", "p0"))


class RegistersTwice(OwnerEngine):
    """Registers each tied param under both names, with a master for each."""

    def register(self, module):
        return dict(module.named_parameters(remove_duplicate=False))


class ShowsTwice(RegistersTwice):
    """Reports no parts, so only params are observed."""

    parts = property()  # Raises AttributeError, as an engine without the method does.


class ShowsAnother(ShowsTwice):
    """Reports an old value of a tied param under its second name."""

    def params(self):
        shown = dict(super().params())
        self.old = getattr(self, "old", shown["again.p0"].detach().clone())
        return {**shown, "again.p0": self.old}


class OwnsUnderItsSecondName(OwnerEngine):
    def register(self, module):
        named = list(module.named_parameters(remove_duplicate=False))
        return dict({id(param): (name, param) for name, param in named}.values())


@pytest.fixture
def result_of(judged):
    """Return the result of a case with tied params."""

    def run(engine):
        system = target(engine, follows=("model.tied",))
        return judge(judged, system, model=TIED, world=WorldSpec(size=2))

    return run


def test_names_of_a_tied_param_are_known():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    assert model_of(module).tied == {"1.weight": "0.weight"}


def test_two_owners_of_a_tied_param_are_a_finding(result_of):
    result = result_of(RegistersTwice)
    assert (result.verdict, result.error) == ("fail", "")
    first = result.findings[0]
    assert first.check == "invariant.ownership"
    assert "the engine also has this tied param under its other name 'again.p0'" in first.message
    assert "belong to rank 0 twice" in first.message


def test_one_tensor_under_two_names_passes(result_of):
    result = result_of(ShowsTwice)
    assert (result.verdict, result.findings, result.error) == ("pass", (), "")


def test_other_value_under_the_second_name_is_a_finding(result_of):
    result = result_of(ShowsAnother)
    assert (result.verdict, result.error) == ("fail", "")
    first = result.findings[0]
    assert (first.check, first.param) == ("equality.params", "p0")
    assert "the engine also has this param as 'again.p0', with other values" in first.message


def test_second_name_alone_passes(result_of):
    result = result_of(OwnsUnderItsSecondName)
    assert (result.verdict, result.findings, result.error) == ("pass", (), "")
