"""dp-cp groups are judged separately, and no call may join two of them."""

from dataclasses import replace

from zero_sim.run.dp_cp_groups import check_crossing, dp_cp_groups_of
from zero_sim.scenario.spec import DataSpec, ModelSpec, NanSpec, Scenario, TopologySpec, WorldSpec
from zero_sim.sim import CollectiveRecord


def scenario(**topology):
    return Scenario(
        schema=1,
        model=ModelSpec(name="mlp"),
        world=WorldSpec(size=8),
        data=DataSpec(nan=NanSpec(step=0, rank=5)),
        topology=TopologySpec(**topology),
    )


def record(*ranks):
    return CollectiveRecord(
        ranks[0], "all_reduce", "g", ranks, 0, "float32", 1, 4, "SUM", False, "f.py", 1
    )


def test_world_without_tp_and_pp_is_one_group():
    case = scenario(cp=2)
    (dp_cp_group,) = dp_cp_groups_of(case)
    assert dp_cp_group.ranks == tuple(range(8))
    assert dp_cp_group.scenario is case


def test_each_group_has_its_own_size_seed_and_nan():
    first, second = dp_cp_groups_of(scenario(tp=2))
    assert (first.ranks, second.ranks) == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert first.scenario.world.size == second.scenario.world.size == 4
    assert first.scenario.run.seed != second.scenario.run.seed
    assert first.scenario.data.nan is None
    assert second.scenario.data.nan.rank == 2


def test_nan_of_an_absent_rank_is_in_no_group():
    """After a reload there may be fewer ranks."""
    case = scenario(tp=2, shared=("positions.weight",))
    split = replace(case, model=ModelSpec(name="tp-block"), world=WorldSpec(size=4))
    parts = dp_cp_groups_of(split)
    assert [part.scenario.data.nan for part in parts] == [None, None]


def test_collective_across_groups_is_a_finding():
    dp_cp_groups = dp_cp_groups_of(scenario(tp=2))
    assert not list(check_crossing([record(0, 2, 4, 6), record(1, 3)], dp_cp_groups))
    (finding,) = check_crossing([record(0, 2), record(2, 5)], dp_cp_groups)
    assert finding.check == "invariant.crossing"
    assert "[2, 5]" in finding.message


def test_equal_group_ranks_of_all_groups_may_communicate():
    """Groups agree on a norm this way: 0 1 and 2 3 with two tp ranks."""
    dp_cp_groups = dp_cp_groups_of(scenario(tp=2))
    assert not list(check_crossing([record(0, 1), record(2, 3)], dp_cp_groups))
    dp_cp_groups = dp_cp_groups_of(scenario(tp=2, pp=2))
    assert not list(check_crossing([record(0, 1, 4, 5), record(2, 6)], dp_cp_groups))
    assert list(check_crossing([record(0, 1, 2)], dp_cp_groups))


def test_shared_and_tied_params_count_once():
    """Shared params count at tp rank 0, tied params at pp rank 0."""
    dp_cp_groups = dp_cp_groups_of(scenario(tp=2, pp=2, shared=("bias",), tied=("w",)))
    assert [dp_cp_group.ranks[0] for dp_cp_group in dp_cp_groups] == [0, 1, 4, 5]
    assert [dp_cp_group.uncounted for dp_cp_group in dp_cp_groups] == [
        (),
        ("bias",),
        ("w",),
        ("bias", "w"),
    ]


def test_world_of_one_group_may_use_any_ranks():
    assert not list(check_crossing([record(0, 5)], dp_cp_groups_of(scenario())))
