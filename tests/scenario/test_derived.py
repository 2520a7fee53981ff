"""Values derived from settings: uneven micro-batches, group ranks, overlap."""

from itertools import permutations, product

import pytest

from zero_sim.layout.topology import AXES, Topology
from zero_sim.scenario.derived import (
    counts_over_ranks,
    group_rank_of,
    limits_of_joins,
    overlaps_grads,
    overlaps_params,
    own_micro_batches,
    world_size_at,
)
from zero_sim.scenario.rules import check_scenario
from zero_sim.scenario.spec import (
    DataSpec,
    ModelSpec,
    NanSpec,
    ReloadSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    TopologySpec,
    WorldSpec,
)

UNEVEN = RunSpec(steps=3, micro_batches=3, own_micro_batches=(3, 1))


def case(**parts):
    return Scenario(
        schema=1,
        **{"model": ModelSpec(name="mlp"), "world": WorldSpec(size=2), "run": UNEVEN, **parts},
    )


def test_own_micro_batches_rotate_from_step_to_step():
    counts = [[own_micro_batches(UNEVEN, step=s, rank=r) for r in range(3)] for s in range(2)]
    assert counts == [[3, 1, 3], [1, 3, 1]]
    assert own_micro_batches(RunSpec(micro_batches=4), step=1, rank=2) == 4


@pytest.mark.parametrize("order", ["-".join(axes) for axes in permutations(AXES)])
def test_group_ranks_equal_those_of_the_topology(order):
    for tp, cp, dp, pp in product((1, 2, 3), repeat=4):
        spec = TopologySpec(tp=tp, cp=cp, pp=pp, order=order)
        for ranks in Topology(tp=tp, cp=cp, dp=dp, pp=pp, order=order).dp_cp_groups():
            places = [
                group_rank_of(rank, topology=spec, world_size=tp * cp * dp * pp) for rank in ranks
            ]
            assert places == list(range(len(ranks)))


def test_world_size_changes_at_the_reload_step():
    smaller = case(reload=ReloadSpec(step=1, world_size=1))
    assert [world_size_at(smaller, step=step) for step in range(3)] == [2, 1, 1]
    assert world_size_at(case(reload=ReloadSpec(step=1)), step=2) == 2


def test_rank_of_a_nan_is_converted_to_its_group_rank():
    """Ranks 0 and 1 come first in their groups, ranks 2 and 3 second."""
    allowed = [
        not check_scenario(
            case(
                model=ModelSpec(name="params", shapes=((3,), (4,))),
                world=WorldSpec(size=4),
                topology=TopologySpec(tp=2),
                run=RunSpec(steps=2, micro_batches=2, own_micro_batches=(1, 2)),
                data=DataSpec(nan=NanSpec(step=0, rank=rank, micro_batch=1)),
            )
        )
        for rank in range(4)
    ]
    assert allowed == [False, False, True, True]


def test_micro_batches_are_counted_over_ranks_if_uneven():
    by = SystemSpec(divide_by="micro-batches")
    assert counts_over_ranks(case(system=by))
    assert not counts_over_ranks(case(system=by, run=RunSpec(micro_batches=3)))
    assert counts_over_ranks(case(system=SystemSpec(divide_by="tokens"), run=RunSpec()))


def test_limits_of_joins_cover_both_worlds():
    assert limits_of_joins(case()) == (2, 0)
    assert limits_of_joins(case(reload=ReloadSpec(step=1, world_size=1, stage=3))) == (1, 1)


def test_uneven_micro_batches_are_accepted():
    assert check_scenario(case()) == []


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"world": WorldSpec(size=1)}, "to have data for all of run.micro_batches in every step"),
        ({"run": RunSpec(micro_batches=2, own_micro_batches=(3, 1))}, "and none for more, got"),
        (
            {
                "run": RunSpec(micro_batches=3, own_micro_batches=(3, 0)),
                "system": SystemSpec(stage=3),
            },
            "a joining rank gathers params in the order of its last micro-batch",
        ),
        (
            {
                "run": RunSpec(micro_batches=3, own_micro_batches=(3, 0)),
                "data": DataSpec(nan=NanSpec(step=0, rank=1)),
            },
            "expected data for the rank, step and micro-batch of data.nan",
        ),
        (
            {
                "run": RunSpec(micro_batches=3, own_micro_batches=(3, 2)),
                "data": DataSpec(nan=NanSpec(step=0, rank=1, micro_batch=2)),
            },
            "expected data for the rank, step and micro-batch of data.nan",
        ),
    ],
)
def test_impossible_micro_batches_are_refused_with_the_reason(parts, words):
    (problem,) = check_scenario(case(**parts))
    assert problem.path == "run.own_micro_batches"
    assert words in problem.message


def test_reload_to_too_few_ranks_is_refused_at_its_field():
    (problem,) = check_scenario(case(reload=ReloadSpec(step=1, world_size=1)))
    assert problem.path == "reload.world_size"


@pytest.mark.parametrize("by", ["micro-batches", "tokens"])
def test_division_before_each_sum_cannot_use_a_count_over_ranks(by):
    early = case(system=SystemSpec(divide="pre", sync="every", divide_by=by))
    (problem,) = check_scenario(early)
    assert problem.path == "system.divide_by"
    assert "is known only after the last micro-batch" in problem.message


@pytest.mark.parametrize(
    ("settings", "grads", "params"),
    [
        ({}, False, False),
        ({"bucket_elems": 9}, True, True),
        ({"bucket_elems": 9, "stage": 0}, True, False),
        ({"bucket_elems": 9, "overlap_grads": False, "overlap_params": False}, False, False),
        ({"overlap_grads": True, "overlap_params": True}, True, True),
    ],
)
def test_overlap_follows_the_buckets_by_default(settings, grads, params):
    """One bucket has nothing to overlap with, and stage 0 gathers no params."""
    system = SystemSpec(**settings)
    assert (overlaps_grads(system), overlaps_params(system)) == (grads, params)
