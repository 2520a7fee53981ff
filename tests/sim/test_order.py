"""Each order model adds in exactly the order of its name."""

from typing import get_args

import pytest
import torch
import torch.distributed as dist

from zero_sim.scenario.spec import OrderName
from zero_sim.sim import RankFailed

BIG = (
    2.0**26
)  # fp32 absorbs 1 and 2 next to it, so the position of a 1 in the order decides the sum.


def reduce_in(world_of, order, columns, dtype=torch.float32, *, seed=0):
    """All-reduce one tensor per rank, with values `columns[rank]`."""
    world = world_of(len(columns), order=order, seed=seed)

    def program(rank):
        x = torch.tensor(columns[rank], dtype=dtype)
        dist.all_reduce(x)
        return x.tolist()

    results = world.run(program)
    assert all(result == results[0] for result in results)
    return results[0]


def large_and_ones(count):
    """Columns of four ranks in which a 1 only counts if it is added after BIG - BIG."""
    return [[BIG] * count, [-BIG] * count, [1.0] * count, [1.0] * count]


@pytest.mark.parametrize(
    ("order", "columns", "expected"),
    [
        # In rank order.
        ("linear", [[BIG], [1.0], [1.0], [-BIG]], [0.0]),
        ("linear", large_and_ones(1), [2.0]),
        # Neighbours first.
        ("tree", [[BIG], [1.0], [1.0], [-BIG]], [0.0]),
        ("tree", large_and_ones(1), [2.0]),
        ("tree", [[BIG], [1.0], [-BIG]], [0.0]),
        # One chunk per rank: chunk c is x[c], x[c+1], ...
        ("ring", large_and_ones(4), [2.0, 0.0, 0.0, 1.0]),
        # Chunk c ends on rank c; chunks are whole vectors of 16 bytes: four fp32 numbers. Chunk 0
        # is x1, x2, x3, x0: the ones drown. Chunk 1: x2, x3, x0, x1. Chunk 2: x3, x0, x1, x2.
        ("nccl-ring", large_and_ones(16), [0.0] * 4 + [0.0] * 4 + [1.0] * 4 + [2.0] * 4),
        # Ranks take turns of 32 elements: x0, x1, ..., then x1, x2, ..., and so on.
        ("nccl-sym", large_and_ones(128), [2.0] * 32 + [0.0] * 32 + [0.0] * 32 + [1.0] * 32),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_order_adds_in_its_documented_order(world_of, order, columns, expected):
    assert reduce_in(world_of, order, columns) == expected


@pytest.mark.parametrize(
    ("order", "total"), [("linear", 256.0), ("linear-fp32", 258.0), ("nccl-sym", 258.0)]
)
def test_wide_sums_round_16_bit_data_once(world_of, order, total):
    assert reduce_in(world_of, order, [[256.0], [1.0], [1.0]], torch.bfloat16) == [total]


def test_ring_reduce_scatter_ends_on_its_destination(world_of):
    columns = [BIG, -BIG, 1.0, 1.0]

    def program(rank):
        out = torch.empty(1)
        dist.reduce_scatter_single(out, torch.full((4,), columns[rank]))
        return out.item()

    # Destination d adds x[d+1], ..., x[d].
    assert world_of(4, order="ring").run(program) == [0.0, 0.0, 1.0, 2.0]


@pytest.mark.parametrize("order", get_args(OrderName))
@pytest.mark.parametrize("numel", [0, 1, 5, 8])
def test_orders_agree_if_every_sum_is_exact(world_of, order, numel):
    assert reduce_in(world_of, order, [[float(r)] * numel for r in range(5)]) == [10.0] * numel


def averaged(world, values, dtype):
    def program(rank):
        whole = torch.tensor([values[rank]] * len(values), dtype=dtype)
        out = torch.empty(1, dtype=dtype)
        dist.reduce_scatter_single(out, whole, op=dist.ReduceOp.AVG)
        return out.item()

    return world.run(program)[0]


@pytest.mark.parametrize("order", ["linear", "linear-fp32", "tree", "ring", "gloo", "random-tree"])
def test_avg_divides_the_sum_once(world_of, order):
    assert averaged(world_of(3, order=order), [1.0] * 3, torch.bfloat16) == 1.0


def test_nccl_ring_avg_multiplies_before_summing(world_of):
    # 7 x bf16(1/3) is 2.34375, and three of them add up to 7.03125.
    assert averaged(world_of(3, order="nccl-ring"), [7.0] * 3, torch.bfloat16) == 7.03125
    assert averaged(world_of(3, order="ring"), [7.0] * 3, torch.bfloat16) == 7.0


def test_nccl_sym_avg_multiplies_the_wide_sum(world_of):
    # 513 does not fit bf16, but a third of it does: the accumulator is not rounded before.
    values = [256.0, 256.0, 1.0]
    assert averaged(world_of(3, order="nccl-sym"), values, torch.bfloat16) == 171.0


def test_premul_sum_multiplies_each_ranks_contribution(world_of):
    def program(rank):
        x = torch.tensor([8.0 + rank])
        dist.all_reduce(x, op=dist._make_nccl_premul_sum(0.5))
        return x.item()

    assert world_of(3, order="nccl-ring").run(program) == [13.5] * 3


@pytest.mark.parametrize("order", ["gloo", "nccl-sym"])
def test_premul_sum_is_refused_if_the_backend_has_none(world_of, order):
    def program(rank):
        dist.all_reduce(torch.ones(2), op=dist._make_nccl_premul_sum(0.5))

    with pytest.raises(RankFailed, match="PREMUL_SUM"):
        world_of(2, order=order).run(program)


def test_random_trees_have_many_shapes(world_of):
    """Absorbed and surviving ones both occur among elements and seeds."""
    columns = large_and_ones(7)
    sums = [reduce_in(world_of, "random-tree", columns, seed=seed) for seed in range(10)]
    assert {each for of_seed in sums for each in of_seed} == {0.0, 1.0, 2.0}


def test_random_trees_follow_the_seed_of_the_world(world_of):
    columns = [[3.0**rank / 7] * 7 for rank in range(5)]

    def run(seed):
        return reduce_in(world_of, "random-tree", columns, torch.bfloat16, seed=seed)

    assert run(1) == run(1)
    assert len({tuple(run(seed)) for seed in range(5)}) > 1
