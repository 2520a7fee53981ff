"""A setting that a case has no use for is refused, with what is used in its place."""

from dataclasses import replace

import pytest

from zero_sim.scenario.rules import check_scenario
from zero_sim.scenario.spec import (
    FreezeSpec,
    ModelSpec,
    OneRankSpec,
    OptimizerSpec,
    ParamGroupSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    TopologySpec,
    WorldSpec,
)
from zero_sim.scenario.unused import UNUSED, without_unused

BARE = ModelSpec(name="params", shapes=((3,),))
MLP = ModelSpec(name="mlp")
ONE = OneRankSpec(param="p1", rank=1)


def case(**parts):
    return Scenario(schema=1, **({"model": MLP} | parts))


WITHOUT_USE = {
    "model.hidden": case(model=replace(BARE, hidden=77)),
    "model.blocks": case(model=replace(BARE, blocks=99)),
    "model.experts": case(model=replace(MLP, experts=5)),
    "model.tied": case(model=replace(MLP, tied=("0.up.bias",))),
    "model.unused": case(model=replace(MLP, unused=("0.up.bias",))),
    "model.one_rank": case(model=replace(MLP, one_rank=(ONE,))),
    "optimizer.eps": case(optimizer=OptimizerSpec(name="sgd", eps=1.0)),
    "system.divide_by": case(system=SystemSpec(divide="none", divide_by="tokens")),
    "system.contiguous_grads": case(system=SystemSpec(contiguous_grads=False)),
    "system.arena": case(system=SystemSpec(stage=1, arena=True)),
    "system.checkpoints": case(system=SystemSpec(checkpoints="whole")),
    "system.offload_checkpoints": case(
        model=ModelSpec(name="tp-block"), system=SystemSpec(offload_checkpoints=True)
    ),
    "system.buffers_by": case(system=SystemSpec(buffers_by="param-group")),
    "topology.order": case(topology=TopologySpec(order="pp-dp-cp-tp")),
    "model.freeze[0].start": case(
        model=replace(MLP, freeze=(FreezeSpec(param="0.up.bias", start=3, stop=4),))
    ),
}
WITH_USE = [
    case(model=replace(BARE, tied=("p0",))),
    case(model=replace(BARE, shapes=((3,), (2,)), unused=("p1",))),
    case(model=replace(BARE, shapes=((3,), (2,)), one_rank=(ONE,))),
    case(model=replace(MLP, hidden=77, blocks=3)),
    case(model=ModelSpec(name="moe", experts=6, hidden=3)),
    case(model=ModelSpec(name="ternary", hidden=3)),
    case(optimizer=OptimizerSpec(name="rmsprop", eps=1.0)),
    case(system=SystemSpec(divide="pre", divide_by="tokens")),
    case(system=SystemSpec(reduce_buffer_elems=4, contiguous_grads=False)),
    case(system=SystemSpec(stage=2, arena=True)),
    case(
        model=ModelSpec(name="tp-block", hidden=4, blocks=1),
        system=SystemSpec(checkpoints="split", offload_checkpoints=True),
    ),
    case(
        system=SystemSpec(buffers_by="param-group"),
        optimizer=OptimizerSpec(groups=(ParamGroupSpec(match="bias", lr=0.1),)),
    ),
    case(topology=TopologySpec(order="dp-tp-cp-pp", tp=2), world=WorldSpec(size=4)),
    case(
        model=replace(MLP, freeze=(FreezeSpec(param="0.up.bias", start=2, stop=9),)),
        run=RunSpec(steps=3),
    ),
]


@pytest.mark.parametrize("path", WITHOUT_USE)
def test_it_is_refused_by_its_path(path):
    assert [problem.path for problem in check_scenario(WITHOUT_USE[path])] == [path]


@pytest.mark.parametrize("scenario", WITH_USE)
def test_what_is_used_is_not(scenario):
    assert check_scenario(scenario) == []
    assert without_unused(scenario) == scenario


@pytest.mark.parametrize("path", WITHOUT_USE)
def test_a_case_without_it_is_valid_and_else_the_same(path):
    scenario = WITHOUT_USE[path]
    left = without_unused(scenario)
    assert check_scenario(left) == []
    assert replace(left, model=MLP, system=SystemSpec(), topology=TopologySpec()) == replace(
        scenario,
        model=MLP,
        system=SystemSpec(),
        topology=TopologySpec(),
        optimizer=left.optimizer,
    )


def test_every_row_is_tried():
    assert {unused.path for unused in UNUSED} | {"model.freeze[0].start"} == WITHOUT_USE.keys()


def test_what_is_used_in_its_place_is_said():
    (problem,) = check_scenario(WITHOUT_USE["model.blocks"])
    assert "only models 'mlp', 'fp8' and 'tp-block' use it, got 99 (integer)" in problem.message
    assert "model 'params' uses dtype, shapes, tied, unused, one_rank, freeze" in problem.message
    (problem,) = check_scenario(WITHOUT_USE["optimizer.eps"])
    assert "optimizer 'sgd' uses lr, warmup_steps, weight_decay, momentum" in problem.message
    assert "betas" not in problem.message


def test_all_are_told_at_once():
    scenario = case(model=replace(BARE, hidden=77, blocks=99, experts=5))
    paths = [problem.path for problem in check_scenario(scenario)]
    assert paths == ["model.hidden", "model.blocks", "model.experts"]
