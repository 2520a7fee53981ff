"""Settings that the model `tp-block` refuses, with their field."""

from dataclasses import replace

import pytest

from zero_sim.scenario.rules import check_scenario
from zero_sim.scenario.spec import (
    DataSpec,
    ExpectSpec,
    ModelSpec,
    Scenario,
    SystemSpec,
    TopologySpec,
    WorldSpec,
)
from zero_sim.scenario.tp_block import SHARED

BLOCKS = ModelSpec(name="tp-block", hidden=8)
SPLIT = Scenario(
    schema=1, model=BLOCKS, world=WorldSpec(size=4), topology=TopologySpec(tp=2, shared=(SHARED,))
)


def test_split_block_is_valid():
    assert check_scenario(SPLIT) == []


REFUSED = {
    "model.hidden": [
        replace(SPLIT, model=replace(BLOCKS, hidden=6)),
        replace(SPLIT, model=replace(BLOCKS, hidden=88, dtype="bf16")),
        replace(SPLIT, model=replace(BLOCKS, dtype="bf16"), data=DataSpec(rows=64)),
    ],
    "topology.shared": [replace(SPLIT, topology=TopologySpec(tp=2))],
    "world.order": [replace(SPLIT, world=WorldSpec(size=4, order="ring"))],
    "expect.one_device": [
        replace(SPLIT, data=DataSpec(ranks="same"), expect=ExpectSpec(one_device=True))
    ],
    "system.checkpoints": [replace(SPLIT, system=SystemSpec(stage=3, checkpoints="split"))],
    "system.target": [replace(SPLIT, system=SystemSpec(target="torch-ddp", stage=0))],
}


@pytest.mark.parametrize(
    ("path", "scenario"), [(path, each) for path, cases in REFUSED.items() for each in cases]
)
def test_incompatible_setting_is_refused_by_its_path(path, scenario):
    assert path in [problem.path for problem in check_scenario(scenario)]


@pytest.mark.parametrize("hidden", [80, 84])
def test_widest_exact_sum_in_bf16_is_accepted(hidden):
    assert check_scenario(replace(SPLIT, model=replace(BLOCKS, hidden=hidden, dtype="bf16"))) == []
