"""Pair of layouts: settings that may change the state are refused."""

from dataclasses import replace

import pytest

from zero_sim.scenario.pair import layouts_in_words, other_layout
from zero_sim.scenario.rules import check_scenario
from zero_sim.scenario.spec import (
    DataSpec,
    LossScaleSpec,
    ModelSpec,
    OptimizerSpec,
    PairSpec,
    ReloadSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    TopologySpec,
    WorldSpec,
)

CASE = Scenario(
    schema=1,
    model=ModelSpec(name="bit-hash", shapes=((4,),)),
    data=DataSpec(ranks="same"),
    world=WorldSpec(size=2),
    system=SystemSpec(stage=1),
    pair=PairSpec(stage=0, world_size=4),
)


def test_pair_is_valid():
    assert not check_scenario(CASE)


def test_other_layout_is_its_own_inverse():
    assert other_layout(other_layout(CASE)) == CASE


def test_layouts_are_described_by_their_differences():
    assert layouts_in_words(CASE) == (
        "expected: as in the layout world.size = 4, system.stage = 0\n"
        "got: in the layout world.size = 2, system.stage = 1"
    )


@pytest.mark.parametrize(
    ("path", "changed"),
    [
        ("model.name", {"model": ModelSpec(name="mlp")}),
        ("data.ranks", {"data": DataSpec()}),
        ("pair", {"pair": PairSpec(stage=1)}),
        ("pair", {"pair": PairSpec()}),
        ("pair.world_size", {"pair": PairSpec(world_size=3)}),
        ("pair.redundancy", {"pair": PairSpec(redundancy=3)}),
        ("data.loss", {"data": DataSpec(ranks="same", loss="mean-of-ranks")}),
        ("data.uneven_rows", {"data": DataSpec(ranks="same", uneven_rows=True)}),
        ("system.divide", {"system": SystemSpec(divide="none")}),
        ("world.order_known", {"world": WorldSpec(order="tree", order_known=False)}),
        ("topology", {"topology": TopologySpec(cp=2)}),
        ("optimizer.loss_scale", {"optimizer": OptimizerSpec(loss_scale=LossScaleSpec())}),
        ("reload", {"run": RunSpec(steps=2), "reload": ReloadSpec(step=1)}),
    ],
)
def test_setting_that_may_change_the_state_is_refused(path, changed):
    assert path in [problem.path for problem in check_scenario(replace(CASE, **changed))]
