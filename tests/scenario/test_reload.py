"""The world after a reload follows the same rules as any world."""

import pytest

from zero_sim.scenario.fitting import after_reload
from zero_sim.scenario.rules import check_scenario
from zero_sim.scenario.spec import (
    DataSpec,
    ExpectSpec,
    ModelSpec,
    ReloadSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    TopologySpec,
    WorldSpec,
)


def case(*, reload, **parts):
    return Scenario(
        schema=1,
        run=RunSpec(steps=2),
        reload=ReloadSpec(step=1, **reload),
        **({"model": ModelSpec(name="mlp"), "world": WorldSpec(size=4)} | parts),
    )


SET_AFTER = {
    "reload.redundancy": case(system=SystemSpec(stage=0), reload={"redundancy": 2}),
    "reload.partition": case(reload={"stage": 0, "partition": "uneven"}),
}
LEFT_AS_IT_WAS = {
    "Also write redundancy = 1": case(system=SystemSpec(redundancy=2), reload={"stage": 0}),
    "Also write partition = 'padded'": case(
        system=SystemSpec(partition="uneven"), reload={"stage": 0}
    ),
    "Leave it out, or write reload.stage = 1.": case(
        system=SystemSpec(overlap_params=True), reload={"stage": 0}
    ),
}
FOUR_IN_RANK_ORDER = WorldSpec(size=4, order="linear")
BIT_HASH = ModelSpec(name="bit-hash", dtype="bf16", shapes=((4,),))
SOUND = [
    case(reload={"stage": 0, "redundancy": 1, "partition": "padded"}),
    case(system=SystemSpec(stage=0), reload={"stage": 1, "redundancy": 2}),
    case(system=SystemSpec(redundancy=2), reload={"stage": 0, "redundancy": 1}),
    case(model=BIT_HASH, reload={"world_size": 256}),
]


@pytest.mark.parametrize("path", SET_AFTER)
def test_setting_without_effect_after_the_reload_is_refused_at_its_field(path):
    (problem,) = check_scenario(SET_AFTER[path])
    assert problem.path == path
    assert problem.message.startswith("stage 0 ")


@pytest.mark.parametrize("suggestion", LEFT_AS_IT_WAS)
def test_kept_setting_without_effect_is_refused_at_the_new_stage(suggestion):
    (problem,) = check_scenario(LEFT_AS_IT_WAS[suggestion])
    assert problem.path == "reload.stage"
    assert problem.suggestion.startswith(suggestion)


def test_one_device_is_refused_with_sharded_experts_after_a_reload():
    (problem,) = check_scenario(
        case(
            model=ModelSpec(name="moe", hidden=2),
            data=DataSpec(ranks="same"),
            expect=ExpectSpec(one_device=True),
            reload={"ep": 2},
        )
    )
    assert problem.path == "reload.ep"
    assert "needs ranks with the same data and all params" in problem.message


def test_alignment_with_uneven_shards_after_a_reload_is_refused():
    scenario = case(system=SystemSpec(align_elems=4), reload={"partition": "uneven"})
    assert [problem.path for problem in check_scenario(scenario)] == ["reload.partition"]


def test_world_after_a_reload_is_limited_by_exact_sums():
    scenario = case(model=BIT_HASH, reload={"world_size": 257})
    assert [problem.path for problem in check_scenario(scenario)] == ["reload.world_size"]


@pytest.mark.parametrize("scenario", SOUND)
def test_setting_with_effect_after_the_reload_is_accepted(scenario):
    assert check_scenario(scenario) == []


def test_setting_with_effect_only_after_the_reload_is_accepted():
    """tp = 2 leaves one axis of two ranks, and two axes of four ranks."""
    topology = TopologySpec(tp=2, order="dp-tp-cp-pp")
    scenario = Scenario(
        schema=1,
        model=ModelSpec(name="mlp"),
        world=WorldSpec(size=2),
        topology=topology,
        run=RunSpec(steps=2),
        reload=ReloadSpec(step=1, world_size=4),
    )
    assert check_scenario(scenario) == []


@pytest.mark.parametrize(
    ("system", "reload", "found"),
    [
        ({}, {"stage": 0}, "reload.stage = 0"),
        ({}, {"stage": 3}, "reload.stage = 3"),
        ({"stage": 3}, {}, "system.stage = 3"),
    ],
)
def test_reduce_buffers_without_effect_after_a_reload_are_refused(system, reload, found):
    scenario = case(system=SystemSpec(**system), reload={"reduce_buffer_elems": 4, **reload})
    (problem,) = check_scenario(scenario)
    assert problem.path == "reload.reduce_buffer_elems"
    assert problem.message.startswith("only stages 1 and 2 have both unsharded params")
    assert problem.message.endswith(f"got 4 (integer) with {found}.")
    assert "stage = 1" in problem.suggestion


def test_reduce_buffers_end_with_their_stage():
    scenario = case(system=SystemSpec(reduce_buffer_elems=4), reload={"stage": 3})
    assert check_scenario(scenario) == []
    assert after_reload(scenario).system.reduce_buffer_elems is None


@pytest.mark.parametrize("reload", [{"bucket_elems": 8}, {"stage": 1}, {"world_size": 2}])
def test_sums_at_the_first_rank_survive_a_reload(reload):
    scenario = case(
        system=SystemSpec(stage=0, sum_by="first-rank"), world=FOUR_IN_RANK_ORDER, reload=reload
    )
    assert check_scenario(scenario) == []
    assert after_reload(scenario).system.sum_by == "first-rank"


def test_all_reduced_sums_end_with_sharding():
    scenario = case(system=SystemSpec(sum_by="all-reduce"), reload={"stage": 0})
    assert check_scenario(scenario) == []
    assert after_reload(scenario).system.sum_by == "reduce-scatter"


def test_arena_with_reduce_buffers_is_refused_before_a_reload():
    system = SystemSpec(stage=2, sync="every", arena=True, reduce_buffer_elems=8)
    (problem,) = check_scenario(case(system=system, reload={"stage": 3}))
    assert problem.path == "system.arena"
    assert "Leave either out" in problem.suggestion
