"""Features of cases are named as they would be written, and each that is drawn is known."""

from dataclasses import replace
from itertools import islice

import pytest

from zero_sim.fuzz.drawing import draws
from zero_sim.fuzz.features import (
    every_feature,
    features_for,
    features_of,
    is_feature,
    layout_features,
    may_meet,
    setting_of,
)
from zero_sim.fuzz.strategies import drawn_cases
from zero_sim.layout import LayoutPolicy, ParamSpec, plan_buffers
from zero_sim.scenario.derived import with_options
from zero_sim.scenario.spec import (
    DataSpec,
    ExpectSpec,
    FaultSpec,
    LossScaleSpec,
    ModelSpec,
    NanSpec,
    OptimizerSpec,
    ParamGroupSpec,
    ReloadSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    TopologySpec,
    WorldSpec,
)
from zero_sim.targets import EVERYTHING

CASE = Scenario(schema=1, model=ModelSpec(name="params", shapes=((4,),)), run=RunSpec(steps=2))


def settings(scenario):
    return {name for name in features_of(scenario) if not name.startswith("layout: ")}


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ({}, set()),
        ({"run": RunSpec(steps=9, seed=5)}, set()),
        ({"world": WorldSpec(size=7)}, set()),
        ({"system": SystemSpec(target="mine")}, set()),
        ({"faults": (FaultSpec(kind="crash", rank=0),)}, set()),
        ({"expect": ExpectSpec(finding="equality")}, set()),
        ({"system": SystemSpec(stage=3)}, {"system.stage=3"}),
        ({"system": SystemSpec(arena=True)}, {"system.arena=true"}),
        ({"system": SystemSpec(contiguous_grads=False)}, {"system.contiguous_grads=false"}),
        ({"system": SystemSpec(overlap_grads=False)}, {"system.overlap_grads=false"}),
        ({"system": SystemSpec(bucket_elems=2)}, {"system.bucket_elems"}),
        ({"run": RunSpec(micro_batches=3)}, {"run.micro_batches"}),
        ({"topology": TopologySpec(shared=("0", "1"))}, {"topology.shared"}),
        ({"optimizer": OptimizerSpec(betas=(0.5, 0.75))}, {"optimizer.betas"}),
        ({"world": WorldSpec(timing="lazy")}, {"world.timing=lazy"}),
        (
            {"optimizer": OptimizerSpec(groups=(ParamGroupSpec(match="0", lr=0.1),))},
            {"optimizer.groups", "optimizer.groups.lr"},
        ),
        (
            {"optimizer": OptimizerSpec(loss_scale=LossScaleSpec(growth_interval=1))},
            {"optimizer.loss_scale", "optimizer.loss_scale.growth_interval"},
        ),
        ({"data": DataSpec(nan=NanSpec(step=0, rank=0))}, {"data.nan"}),
        ({"reload": ReloadSpec(step=1, stage=2)}, {"reload", "reload.stage=2"}),
    ],
)
def test_settings_that_are_not_as_by_default(more, names):
    assert settings(replace(CASE, **more)) == {"model.name=params", *names}


def test_an_option_of_a_target_has_its_value():
    case = with_options(CASE, {"op": "sum"})
    assert "system.options.op=sum" in features_of(case)
    assert is_feature("system.options.op=sum")


def test_what_is_special_about_the_layout():
    assert {"layout: param cut once", "layout: payload just fits"} <= features_of(CASE)


def test_all_that_is_drawn_is_known():
    drawn = islice(draws(drawn_cases(), seed="features"), 150)
    assert set().union(*map(features_of, drawn)) <= {*every_feature()}


def test_no_feature_is_there_twice():
    assert len({*every_feature()}) == len(every_feature())


class TestForATarget:
    def test_one_that_can_do_everything_can_have_every_feature(self):
        able = replace(EVERYTHING, optimizers=(*EVERYTHING.optimizers, "own"))
        assert features_for(able) == every_feature()

    def test_what_it_does_not_follow_is_left_out_and_what_is_in_it(self):
        able = replace(EVERYTHING, follows=("system.bucket_elems",))
        names = features_for(able)
        assert "system.bucket_elems" in names
        assert {"world.races=true", "data.nan", "layout: empty param"} <= {*names}
        gone = {"system.arena=true", "optimizer.groups.lr", "reload", "reload.form=consolidated"}
        assert not gone & {*names}

    def test_after_a_checkpoint_it_follows_what_it_follows_before(self):
        able = replace(EVERYTHING, follows=("reload", "system.bucket_elems"))
        names = features_for(able)
        assert {"reload", "reload.bucket_elems", "reload.world_size"} <= {*names}
        assert "reload.redundancy" not in names

    def test_values_are_those_that_it_can_be_asked_for(self):
        able = replace(EVERYTHING, stages=(0, 1), orders=("ring",), models=("params",))
        names = features_for(able)
        assert {"system.stage=0", "reload.stage=1", "world.order=ring"} <= {*names}
        assert not {"system.stage=3", "reload.stage=2", "world.order=gloo"} & {*names}
        assert [name for name in names if setting_of(name) == "model.name"] == ["model.name=params"]


@pytest.mark.parametrize(
    ("one", "other", "met"),
    [
        ("system.stage=2", "system.stage=3", False),
        ("reload", "reload.stage=2", False),
        ("optimizer.groups.lr", "optimizer.groups", False),
        ("system.divide=pre", "system.divide_by=tokens", True),
        ("system.stage=2", "reload.stage=2", True),
        ("layout: aligned", "layout: reversed", True),
    ],
)
def test_values_of_one_setting_make_no_pair_nor_a_table_and_what_is_in_it(one, other, met):
    assert may_meet(one, other) is met


def layout(sizes, **policy):
    specs = [ParamSpec(name=f"p{i}", shape=(n,), dtype="fp32") for i, n in enumerate(sizes)]
    return plan_buffers(specs, policy=LayoutPolicy(**policy))


@pytest.mark.parametrize(
    ("sizes", "policy", "expected"),
    [
        ([4], {"shard_count": 1}, {"one shard"}),
        ([4], {"shard_count": 2}, {"param cut once", "payload just fits"}),
        ([6], {"shard_count": 3}, {"param cut often", "payload just fits"}),
        (
            [2, 2],
            {"shard_count": 2},
            {"shard ends between params", "param of N", "payload just fits"},
        ),
        (
            [3],
            {"shard_count": 2},
            {"param cut once", "bucket with padding", "payload one over", "payload one short"},
        ),
        (
            [1, 0],
            {"shard_count": 4},
            {
                "bucket with padding", "shard without payload", "rank that owns nothing",
                "empty param", "one-element param", "param smaller than N", "payload one over",
            },
        ),
        (
            [4, 4],
            {"shard_count": 2, "bucket_elems": 4},
            {
                "param cut once", "payload just fits", "bucket exactly full", "bucket of one param",
                "several buckets",
            },
        ),
        (
            [5],
            {"shard_count": 2, "partition": "uneven"},
            {"param cut once", "uneven shards", "payload one over", "payload one short"},
        ),
        (
            [6],
            {"shard_count": 2, "align_elems": 3},
            {"param cut once", "aligned", "payload just fits"},
        ),
        (
            [2, 2],
            {"shard_count": 1, "param_order": "reverse"},
            {"one shard", "reversed"},
        ),
    ],
)  # fmt: skip
def test_features_of_a_layout(sizes, policy, expected):
    assert layout_features(layout(sizes, **policy)) == expected


def test_several_buffers_are_one_layout():
    specs = [
        ParamSpec(name="dense", shape=(4,), dtype="fp32"),
        ParamSpec(name="expert", shape=(3,), dtype="fp32", kind="expert"),
    ]
    dense = plan_buffers(specs[:1], policy=LayoutPolicy(shard_count=4))
    expert = plan_buffers(specs[1:], policy=LayoutPolicy(shard_count=1))
    found = layout_features([*dense, *expert])
    assert {"several buffers", "buffers sharded differently", "one shard"} <= found
    assert "rank that owns nothing" not in found
