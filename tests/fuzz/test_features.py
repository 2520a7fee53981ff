"""Features of cases, named as in scenario files; every drawn feature is known."""

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
def test_non_default_settings_are_features(more, names):
    assert settings(replace(CASE, **more)) == {"model.name=params", *names}


def test_target_option_feature_includes_its_value():
    case = with_options(CASE, {"op": "sum"})
    assert "system.options.op=sum" in features_of(case)
    assert is_feature("system.options.op=sum")


def test_layout_features_of_a_case_are_found():
    assert {"layout: param cut once", "layout: payload just fits"} <= features_of(CASE)


def test_every_drawn_feature_is_known():
    drawn = islice(draws(drawn_cases(), seed="features"), 150)
    assert set().union(*map(features_of, drawn)) <= {*every_feature()}


def test_no_feature_is_listed_twice():
    assert len({*every_feature()}) == len(every_feature())


class TestForATarget:
    def test_unlimited_capabilities_have_every_feature(self):
        able = replace(EVERYTHING, optimizers=(*EVERYTHING.optimizers, "own"))
        assert features_for(able) == every_feature()

    def test_features_of_options_not_followed_are_omitted(self):
        able = replace(EVERYTHING, follows=("system.bucket_elems",))
        names = features_for(able)
        assert "system.bucket_elems" in names
        assert {"world.races=true", "data.nan", "layout: empty param"} <= {*names}
        gone = {"system.arena=true", "optimizer.groups.lr", "reload", "reload.form=consolidated"}
        assert not gone & {*names}

    def test_reload_features_need_the_followed_option(self):
        able = replace(EVERYTHING, follows=("reload", "system.bucket_elems"))
        names = features_for(able)
        assert {"reload", "reload.bucket_elems", "reload.world_size"} <= {*names}
        assert "reload.redundancy" not in names

    def test_feature_values_are_within_capabilities(self):
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
def test_features_of_one_setting_or_table_make_no_pair(one, other, met):
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
def test_layout_features_are_found(sizes, policy, expected):
    assert layout_features(layout(sizes, **policy)) == expected


def test_several_buffers_make_one_layout():
    specs = [
        ParamSpec(name="dense", shape=(4,), dtype="fp32"),
        ParamSpec(name="expert", shape=(3,), dtype="fp32", kind="expert"),
    ]
    dense = plan_buffers(specs[:1], policy=LayoutPolicy(shard_count=4))
    expert = plan_buffers(specs[1:], policy=LayoutPolicy(shard_count=1))
    found = layout_features([*dense, *expert])
    assert {"several buffers", "buffers sharded differently", "one shard"} <= found
    assert "rank that owns nothing" not in found
