"""Rules for values of a scenario."""

import dataclasses

import pytest

from zero_sim.scenario import (
    DataSpec,
    ExpectSpec,
    ModelSpec,
    NanSpec,
    OptimizerSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    WorldSpec,
)
from zero_sim.scenario.fields import field_paths, type_at
from zero_sim.scenario.rules import BOUNDS, RULES, check_scenario
from zero_sim.scenario.spec import (
    FreezeSpec,
    LossScaleSpec,
    ParamGroupSpec,
    ReloadSpec,
    TopologySpec,
)

MLP = Scenario(schema=1, model=ModelSpec(name="mlp"))
PARAMS = Scenario(schema=1, model=ModelSpec(name="params", shapes=((3,),)))
DIGITS = Scenario(schema=1, model=ModelSpec(name="digits"))


def paths_of(scenario):
    """Return the paths of all problems."""
    return [problem.path for problem in check_scenario(scenario)]


@pytest.mark.parametrize(
    ("path", "changed"),
    [
        ("model.hidden", {"model": ModelSpec(name="mlp", hidden=0)}),
        ("model.blocks", {"model": ModelSpec(name="mlp", blocks=0)}),
        ("data.rows", {"data": DataSpec(rows=0)}),
        ("world.size", {"world": WorldSpec(size=0)}),
        ("world.size", {"world": WorldSpec(size=4097)}),
        ("system.bucket_elems", {"system": SystemSpec(bucket_elems=0)}),
        ("system.align_elems", {"system": SystemSpec(align_elems=0)}),
        ("optimizer.lr", {"optimizer": OptimizerSpec(lr=0.0)}),
        ("optimizer.lr", {"optimizer": OptimizerSpec(lr=float("nan"))}),
        ("optimizer.lr", {"optimizer": OptimizerSpec(lr=float("inf"))}),
        ("optimizer.betas[1]", {"optimizer": OptimizerSpec(betas=(0.9, 1.0))}),
        ("optimizer.betas[0]", {"optimizer": OptimizerSpec(betas=(-0.1, 0.9))}),
        ("optimizer.eps", {"optimizer": OptimizerSpec(eps=-1e-8)}),
        ("optimizer.weight_decay", {"optimizer": OptimizerSpec(weight_decay=-0.1)}),
        ("run.steps", {"run": RunSpec(steps=0)}),
        ("run.micro_batches", {"run": RunSpec(micro_batches=0)}),
        ("run.seed", {"run": RunSpec(seed=-1)}),
        ("run.stall_seconds", {"run": RunSpec(stall_seconds=0.0)}),
        ("expect.nonzero_min", {"expect": ExpectSpec(nonzero_min=1.5)}),
        ("model.shapes", {"model": ModelSpec(name="params")}),
        ("model.shapes[0][1]", {"model": ModelSpec(name="params", shapes=((2, -1),))}),
        ("model.shapes", {"model": ModelSpec(name="params", shapes=((2**20, 2**20),))}),
        ("data.nan.step", {"data": DataSpec(nan=NanSpec(step=3, rank=0))}),
        ("data.nan.rank", {"data": DataSpec(nan=NanSpec(step=0, rank=2))}),
        ("data.nan.rank", {"data": DataSpec(nan=NanSpec(step=0, rank=-1))}),
        ("data.nan.micro_batch", {"data": DataSpec(nan=NanSpec(step=0, rank=0, micro_batch=1))}),
        ("data.nan.element", {"data": DataSpec(nan=NanSpec(step=0, rank=0, element=-1))}),
    ],
)
def test_one_broken_rule_is_one_problem(path, changed):
    assert paths_of(dataclasses.replace(MLP, **changed)) == [path]


@pytest.mark.parametrize(
    "scenario",
    [
        MLP,
        PARAMS,
        dataclasses.replace(DIGITS, expect=ExpectSpec(accuracy_min=0.95, nonzero_min=0.0)),
        dataclasses.replace(MLP, optimizer=OptimizerSpec(name="sgd", momentum=0.9)),
        dataclasses.replace(MLP, world=WorldSpec(size=4096, order="ring")),
        dataclasses.replace(MLP, data=DataSpec(nan=NanSpec(step=2, rank=1))),
        dataclasses.replace(MLP, data=DataSpec(nan=NanSpec(step=2, rank=1, element=10**9))),
        dataclasses.replace(PARAMS, model=ModelSpec(name="params", shapes=())),
        dataclasses.replace(PARAMS, model=ModelSpec(name="params", shapes=((0,), ()))),
    ],
)
def test_extreme_values_are_accepted(scenario):
    assert check_scenario(scenario) == []


def test_several_broken_rules_are_listed_together():
    scenario = dataclasses.replace(MLP, world=WorldSpec(size=0), run=RunSpec(steps=-1, seed=-1))
    assert paths_of(scenario) == ["world.size", "run.steps", "run.seed"]


def test_nan_beyond_the_world_names_both_numbers():
    (problem,) = check_scenario(
        dataclasses.replace(MLP, data=DataSpec(nan=NanSpec(step=0, rank=5)))
    )
    assert str(problem) == (
        "data.nan.rank: expected an integer at least 0 and less than world.size = 2, "
        "got 5 (integer). Try 1; ranks count from 0."
    )


def test_nan_after_a_reload_needs_a_rank_of_that_world():
    """A missing rank has no data."""
    smaller = dataclasses.replace(
        MLP, run=RunSpec(steps=4), reload=ReloadSpec(step=2, world_size=1)
    )
    before, after = (
        check_scenario(dataclasses.replace(smaller, data=DataSpec(nan=NanSpec(step=step, rank=1))))
        for step in (1, 2)
    )
    assert before == []
    assert [str(problem) for problem in after] == [
        "data.nan.rank: expected an integer at least 0 and less than reload.world_size = 1, "
        "got 1 (integer). Try 0; ranks count from 0."
    ]


def test_rules_read_existing_fields():
    """A renamed field must be renamed in the rules."""
    paths = {bound.path for bound in BOUNDS} | {path for rule in RULES for path in rule.reads}
    assert paths <= set(field_paths())
    assert all(type_at(path.split(".")) is not None for path in paths)


def test_known_mistakes_disable_the_rules_that_read_them():
    """A field of the wrong type has no value to check."""
    scenario = dataclasses.replace(MLP, world=WorldSpec(size=0))
    assert check_scenario(scenario, known_bad={"world"}) == []


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        (
            "optimizer.loss_scale.initial",
            {"optimizer": OptimizerSpec(loss_scale=LossScaleSpec(initial=3.0))},
        ),
        (
            "optimizer.groups[0].lr",
            {"optimizer": OptimizerSpec(groups=(ParamGroupSpec(match="x", lr=-1.0),))},
        ),
        ("system.redundancy", {"system": SystemSpec(redundancy=3)}),
        ("system.partition", {"system": SystemSpec(partition="uneven", stage=0)}),
        ("topology.order", {"topology": TopologySpec(order="tp-dp")}),
        ("world.size", {"topology": TopologySpec(tp=3)}),
        ("reload.step", {"reload": ReloadSpec(step=9)}),
        (
            "topology.ep",
            {"model": ModelSpec(name="moe", experts=3), "topology": TopologySpec(ep=3)},
        ),
        (
            "model.experts",
            {"model": ModelSpec(name="moe", experts=3), "topology": TopologySpec(ep=2)},
        ),
        ("reload.ep", {"reload": ReloadSpec(step=1, ep=2)}),
        ("reload.ep", {"model": ModelSpec(name="moe"), "reload": ReloadSpec(step=1, ep=3)}),
        ("reload", {"reload": ReloadSpec(step=1, world_size=3, redundancy=2)}),
        (
            "topology.ep",
            {
                "model": ModelSpec(name="moe"),
                "topology": TopologySpec(ep=2),
                "system": SystemSpec(redundancy=2),
            },
        ),
        (
            "model.freeze[0].stop",
            {"model": ModelSpec(name="mlp", freeze=(FreezeSpec(param="x", start=2, stop=2),))},
        ),
        ("reload", {"topology": TopologySpec(tp=2), "reload": ReloadSpec(step=1, world_size=3)}),
    ],
)
def test_incompatible_features_are_refused(path, parts):
    problems = check_scenario(dataclasses.replace(MLP, **parts))
    assert path in [problem.path for problem in problems]
    assert all(problem.suggestion for problem in problems)


@pytest.mark.parametrize(
    "changed",
    [
        {"reload": ReloadSpec(step=1)},
        {"model": ModelSpec(name="moe")},
        {"model": ModelSpec(name="fp8", dtype="bf16")},
        {"topology": TopologySpec(tp=2)},
    ],
    ids=["reload", "experts", "fp8", "tp"],
)
def test_some_cases_need_a_known_order(changed):
    unknown = dataclasses.replace(MLP, world=WorldSpec(size=4, order_known=False))
    assert paths_of(unknown) == []
    assert paths_of(dataclasses.replace(unknown, **changed)) == ["world.order_known"]
    known = dataclasses.replace(unknown, world=WorldSpec(size=4))
    assert paths_of(dataclasses.replace(known, **changed)) == []
