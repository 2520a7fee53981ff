"""Settings without an effect in a case: refused with the reason, and removed by repairs."""

from dataclasses import replace

import pytest

from zero_sim.scenario.applies import APPLIES
from zero_sim.scenario.fitting import without_unused
from zero_sim.scenario.rules import check_scenario
from zero_sim.scenario.spec import (
    DataSpec,
    ExpectSpec,
    FreezeSpec,
    ModelSpec,
    OneRankSpec,
    OptimizerSpec,
    ParamGroupSpec,
    RunSpec,
    Scenario,
    SkipSpec,
    SystemSpec,
    TopologySpec,
    WorldSpec,
)

BARE = ModelSpec(name="params", shapes=((3,),))
TWO = ModelSpec(name="params", shapes=((3,), (2,)))
MLP = ModelSpec(name="mlp")
ONE = OneRankSpec(param="p1", rank=1)


def case(**parts):
    return Scenario(schema=1, **({"model": MLP} | parts))


def optimizer(name, **settings):
    return case(optimizer=OptimizerSpec(name=name, **settings))


def system(**settings):
    return case(system=SystemSpec(**settings))


TP_BLOCK = ModelSpec(name="tp-block")
WITHOUT_USE = {
    "model.hidden": case(model=replace(BARE, hidden=77)),
    "model.blocks": case(model=replace(BARE, blocks=99)),
    "model.experts": case(model=replace(MLP, experts=5)),
    "model.fp8_format": case(model=replace(MLP, fp8_format="e4m3")),
    "model.recompute": case(model=replace(BARE, recompute="reentrant")),
    "model.shapes": case(model=replace(MLP, shapes=((1,),))),
    "model.nested": case(model=replace(MLP, nested=True)),
    "model.tied_first": case(model=replace(BARE, tied_first=True)),
    "model.skip": case(model=replace(MLP, skip=(SkipSpec(param="p1", start=0, stop=1),))),
    "model.skip[0].start": case(model=replace(TWO, skip=(SkipSpec(param="p1", start=3, stop=4),))),
    "model.tied": case(model=replace(MLP, tied=("0.up.bias",))),
    "model.unused": case(model=replace(MLP, unused=("0.up.bias",))),
    "model.one_rank": case(model=replace(MLP, one_rank=(ONE,))),
    "model.buffer": case(model=ModelSpec(name="moe", buffer="saved")),
    "model.freeze": case(
        model=replace(TP_BLOCK, freeze=(FreezeSpec(param="positions.weight", start=0, stop=1),))
    ),
    "model.freeze[0].start": case(
        model=replace(MLP, freeze=(FreezeSpec(param="0.up.bias", start=3, stop=4),))
    ),
    "data.epoch_steps": case(data=DataSpec(rows=1, epoch_steps=2)),
    "data.loss": case(model=ModelSpec(name="digits"), data=DataSpec(loss="sum")),
    "world.order_known": case(model=TP_BLOCK, world=WorldSpec(order_known=False)),
    "topology.pp": case(model=TP_BLOCK, topology=TopologySpec(pp=2)),
    "topology.ep": case(topology=TopologySpec(ep=2)),
    "topology.shared": case(topology=TopologySpec(pp=2, shared=("bias",))),
    "topology.tied": case(topology=TopologySpec(tp=2, tied=("bias",))),
    "topology.order": case(topology=TopologySpec(order="pp-dp-cp-tp")),
    "optimizer.betas": optimizer("sgd", betas=(0.5, 0.5)),
    "optimizer.eps": optimizer("sgd", eps=1.0),
    "optimizer.weight_decay": optimizer("rprop", weight_decay=0.1),
    "optimizer.momentum": optimizer("adamw", momentum=0.9),
    "optimizer.nesterov": optimizer("sgd", nesterov=True),
    "optimizer.amsgrad": optimizer("sgd", amsgrad=True),
    "optimizer.foreach": optimizer("nadam", foreach=True),
    "optimizer.clip_value": optimizer("sgd", clip_norm=1.0, clip_value=1.0),
    "run.own_micro_batches": case(
        model=TP_BLOCK, run=RunSpec(micro_batches=2, own_micro_batches=(1, 2))
    ),
    "run.evaluate": case(model=TP_BLOCK, run=RunSpec(evaluate="within-step")),
    "expect.accuracy_min": case(expect=ExpectSpec(accuracy_min=0.5)),
    "expect.one_device": case(expect=ExpectSpec(one_device=True)),
    "system.divide_by": system(divide="none", divide_by="tokens"),
    "system.redundancy": system(stage=0, redundancy=2),
    "system.partition": system(partition="uneven", align_elems=2),
    "system.overlap_params": system(stage=0, overlap_params=True),
    "system.prefetch": system(prefetch=0),
    "system.reshard_after_forward": system(reshard_after_forward=False),
    "system.gather_after_step": system(gather_after_step=True),
    "system.sum_by": system(stage=0, sum_by="all-reduce"),
    "system.reduce_buffer_elems": system(stage=3, reduce_buffer_elems=4),
    "system.contiguous_grads": system(contiguous_grads=False),
    "system.gather_chunk_elems": system(partition="one-owner", gather_chunk_elems=4),
    "system.arena": system(stage=1, arena=True),
    "system.buffers_by": system(buffers_by="param-group"),
    "system.offload_state": case(
        optimizer=OptimizerSpec(name="muon"), system=SystemSpec(offload_state=True)
    ),
    "system.step_buffer_elems": case(
        optimizer=OptimizerSpec(name="lamb"), system=SystemSpec(step_buffer_elems=4)
    ),
    "system.checkpoints": system(checkpoints="whole"),
    "system.offload_checkpoints": case(model=TP_BLOCK, system=SystemSpec(offload_checkpoints=True)),
}
UNUSED = sorted(
    {row.path for row in APPLIES if row.after == "unused"}
    | {"topology.order", "model.freeze[0].start"}
)
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
def test_setting_without_effect_is_refused_by_its_path(path):
    assert [problem.path for problem in check_scenario(WITHOUT_USE[path])] == [path]


@pytest.mark.parametrize("scenario", WITH_USE)
def test_setting_with_effect_is_accepted_and_kept(scenario):
    assert check_scenario(scenario) == []
    assert without_unused(scenario) == scenario


@pytest.mark.parametrize("path", UNUSED)
def test_repair_removes_only_the_setting_without_effect(path):
    scenario = WITHOUT_USE[path]
    left = without_unused(scenario)
    assert check_scenario(left) == []
    table = path.partition(".")[0]
    assert replace(left, **{table: getattr(scenario, table)}) == scenario


def test_every_row_is_tried():
    assert {row.path for row in APPLIES} <= WITHOUT_USE.keys()


def test_message_lists_settings_with_effect():
    (problem,) = check_scenario(WITHOUT_USE["model.blocks"])
    assert (
        "only models 'mlp', 'fp8', 'tp-block' and 'gpt' use it, got 99 (integer)" in problem.message
    )
    uses = "model.name = 'params'; 'params' uses dtype, shapes, nested, tied"
    assert uses in problem.message
    (problem,) = check_scenario(WITHOUT_USE["optimizer.eps"])
    assert "; 'sgd' uses lr, warmup_steps, weight_decay, momentum" in problem.message
    assert "betas" not in problem.message


def test_all_settings_without_effect_are_listed():
    scenario = case(model=replace(BARE, hidden=77, blocks=99, experts=5))
    paths = [problem.path for problem in check_scenario(scenario)]
    assert paths == ["model.hidden", "model.blocks", "model.experts"]


def test_message_names_other_fields_and_a_remedy():
    (problem,) = check_scenario(WITHOUT_USE["optimizer.nesterov"])
    assert problem.message.endswith("got true (boolean) with optimizer.momentum = 0.0.")
    assert problem.suggestion == "Leave it out, or set optimizer.momentum."
    (problem,) = check_scenario(WITHOUT_USE["optimizer.clip_value"])
    assert problem.suggestion == "Leave it out, or leave out optimizer.clip_norm."
    (problem,) = check_scenario(WITHOUT_USE["topology.pp"])
    assert problem.suggestion == "Leave it out, or change model.name."
    (problem,) = check_scenario(WITHOUT_USE["system.gather_after_step"])
    assert problem.suggestion == "Leave it out, or write system.stage = 3."
