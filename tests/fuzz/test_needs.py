"""What a case must have to show what a smallest case shows."""

from dataclasses import replace

import pytest

from zero_sim.fuzz.needs import NOTHING, Needs
from zero_sim.scenario.spec import (
    ModelSpec,
    OptimizerSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    WorldSpec,
)

SMALLEST = Scenario(
    schema=1,
    model=ModelSpec(name="params", shapes=((2,),)),
    world=WorldSpec(size=2),
    system=SystemSpec(redundancy=2),
    run=RunSpec(steps=2),
)
LARGER = Scenario(
    schema=1,
    model=ModelSpec(name="params", shapes=((4,), (3,)), dtype="bf16"),
    world=WorldSpec(size=4),
    system=SystemSpec(redundancy=4, bucket_elems=3),
    optimizer=OptimizerSpec(lr=0.5),
    run=RunSpec(steps=3),
)


def test_a_larger_case_with_the_same_settings_of_other_values_has_it():
    assert Needs.of(SMALLEST).met_by(LARGER)
    assert Needs.of(SMALLEST).met_by(SMALLEST)


@pytest.mark.parametrize(
    "less",
    [
        {"world": WorldSpec(size=1)},
        {"run": RunSpec(steps=1)},
        {"system": SystemSpec(bucket_elems=3)},
        {"model": ModelSpec(name="params", shapes=((1,),))},
    ],
)
def test_a_case_that_lacks_any_of_it_has_it_not(less):
    assert not Needs.of(SMALLEST).met_by(replace(LARGER, **less))


def test_which_model_and_learning_rate_it_has_does_not_matter():
    needs = Needs.of(replace(SMALLEST, optimizer=OptimizerSpec(lr=0.1)))
    assert needs.met_by(replace(LARGER, optimizer=OptimizerSpec(), model=ModelSpec(name="mlp")))


def test_any_case_has_nothing():
    assert NOTHING.met_by(replace(SMALLEST, model=ModelSpec(name="params", shapes=())))
