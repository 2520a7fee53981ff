"""What a target declares is what it is asked for, and what the reference replays."""

from dataclasses import replace

import pytest

from zero_sim.errors import Problem
from zero_sim.scenario.spec import (
    ModelSpec,
    OptimizerSpec,
    ReloadSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    TopologySpec,
    WorldSpec,
)
from zero_sim.targets import Capabilities, Numerics, find_target, refusals

PLAIN = Scenario(schema=1, model=ModelSpec(name="mlp"), optimizer=OptimizerSpec(lr=0.5))


class Modest:
    name = "modest"

    def build(self, module, *, scenario, group):
        raise AssertionError("not built here")


def paths(scenario, **declared):
    target = Modest()
    for name, value in declared.items():
        setattr(target, name, value)
    return [problem.path for problem in refusals(target, scenario)]


def test_the_plainest_case_is_within_any_capabilities():
    assert paths(PLAIN) == []


@pytest.mark.parametrize(
    ("parts", "path"),
    [
        ({"model": ModelSpec(name="unusual")}, "model.name"),
        ({"model": ModelSpec(name="mlp", dtype="bf16")}, "model.dtype"),
        ({"optimizer": OptimizerSpec(name="sgd")}, "optimizer.name"),
        ({"optimizer": OptimizerSpec(clip_norm=1.0)}, "optimizer.clip_norm"),
        ({"world": WorldSpec(order="ring")}, "world.order"),
        ({"system": SystemSpec(sync="every")}, "system.sync"),
        ({"system": SystemSpec(redundancy=2)}, "system.redundancy"),
        ({"system": SystemSpec(bucket_elems=4)}, "system.bucket_elems"),
        ({"topology": TopologySpec(tp=2)}, "topology.tp"),
        ({"run": RunSpec(micro_batches=2)}, "run.micro_batches"),
        ({"reload": ReloadSpec(step=1)}, "reload"),
    ],
)
def test_what_is_not_declared_is_refused_by_its_path(parts, path):
    assert paths(replace(PLAIN, **parts)) == [path]


def test_all_problems_are_told_at_once():
    scenario = replace(PLAIN, system=SystemSpec(sync="every"), run=RunSpec(micro_batches=2))
    assert paths(scenario) == ["system.sync", "run.micro_batches"]


def test_an_option_that_is_followed_is_not_refused():
    able = Capabilities(follows=("system.sync", "run.micro_batches"))
    scenario = replace(PLAIN, system=SystemSpec(sync="every"), run=RunSpec(micro_batches=2))
    assert paths(scenario, capabilities=able) == []


def test_a_setting_that_the_numerics_state_may_be_stated_by_a_scenario_too():
    premul = replace(PLAIN, system=SystemSpec(divide="premul"))
    assert paths(premul, numerics=Numerics(divide="premul")) == []
    assert paths(premul, numerics=Numerics(divide="pre")) == ["system.divide"]


@pytest.mark.parametrize(
    ("shape", "able"), [((), {"scalar_params": False}), ((0, 2), {"empty_params": False})]
)
def test_shapes_that_a_target_cannot_hold_are_refused(shape, able):
    scenario = replace(PLAIN, model=ModelSpec(name="params", shapes=((3,), shape)))
    assert paths(scenario, capabilities=Capabilities(**able)) == ["model.shapes[1]"]
    assert paths(scenario) == []


def test_more_ranks_than_a_target_takes_are_refused():
    scenario = replace(PLAIN, world=WorldSpec(size=4))
    assert paths(scenario, capabilities=Capabilities(world_size_max=3)) == ["world.size"]


def test_a_target_may_refuse_more():
    mine = Problem(path="data.rows", message="expected an even number, got 3.")
    assert paths(PLAIN, refuses=lambda scenario: [mine]) == ["data.rows"]


def test_the_projects_own_system_refuses_nothing():
    scenario = replace(PLAIN, model=ModelSpec(name="unusual"), system=SystemSpec(sync="every"))
    assert refusals(find_target("zero_sim"), scenario) == ()


def test_the_reference_replays_what_the_numerics_say():
    numerics = Numerics(divide="premul", grad_dtype="fp32")
    system = numerics.replayed(replace(PLAIN, system=SystemSpec(sync="every"))).system
    assert (system.divide, system.grad_dtype, system.sync) == ("premul", "fp32", "every")


RELOADING = Capabilities(follows=("reload",), world_size_max=3)
GROWS = replace(PLAIN, reload=ReloadSpec(step=1, world_size=4))


def test_the_world_after_a_checkpoint_must_be_within_the_capabilities_too():
    assert paths(GROWS, capabilities=RELOADING) == ["reload.world_size"]
    smaller = replace(PLAIN, reload=ReloadSpec(step=1, world_size=3))
    assert paths(smaller, capabilities=RELOADING) == []


def test_a_layout_after_a_checkpoint_that_is_not_followed_is_refused():
    scenario = replace(PLAIN, reload=ReloadSpec(step=1, bucket_elems=4))
    assert paths(scenario, capabilities=RELOADING) == ["reload.bucket_elems"]


def test_a_targets_own_refusal_is_asked_about_the_world_after_a_checkpoint():
    def refuses(scenario):
        if scenario.world.size > 3:
            yield Problem(path="world.size", message="expected at most 3.")

    able = Capabilities(follows=("reload",))
    assert paths(GROWS, capabilities=able, refuses=refuses) == ["reload.world_size"]


def test_what_is_wrong_before_and_after_a_checkpoint_is_told_once():
    mine = Problem(path="data.rows", message="expected an even number, got 3.")
    able = Capabilities(follows=("reload",))
    assert paths(GROWS, capabilities=able, refuses=lambda scenario: [mine]) == ["data.rows"]


BY_PARAMS = {
    "numerics": Numerics(norm="of-params"),
    "capabilities": Capabilities(follows=("optimizer.clip_norm", "topology.tp")),
}
CLIPPED = replace(PLAIN, optimizer=OptimizerSpec(clip_norm=1.0), world=WorldSpec(size=2))


@pytest.mark.parametrize(
    ("parts", "path"),
    [
        ({}, []),
        ({"topology": TopologySpec(tp=2)}, ["optimizer.clip_norm"]),
        ({"world": WorldSpec(size=2, order_known=False)}, ["world.order_known"]),
    ],
    ids=["one cell", "a norm over cells", "an unknown order"],
)
def test_a_norm_of_params_norms_is_refused_where_nothing_is_proven_of_it(parts, path):
    assert paths(replace(CLIPPED, **parts), **BY_PARAMS) == path
    unclipped = replace(CLIPPED, optimizer=PLAIN.optimizer, **parts)
    assert paths(unclipped, **BY_PARAMS) == []
