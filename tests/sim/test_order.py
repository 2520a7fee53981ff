"""Each order model adds in exactly the order that it names."""

from typing import get_args

import pytest
import torch
import torch.distributed as dist

from zero_sim.scenario.spec import OrderName
from zero_sim.sim import RankFailed

BIG = 2.0**26  # fp32 absorbs 1 and 2 beside it, so the place of a 1 in the order decides the sum.


def reduce_in(world_of, order, columns, dtype=torch.float32, *, seed=0):
    """All-reduce one tensor a rank, given by `columns[rank]`."""
    world = world_of(len(columns), order=order, seed=seed)

    def program(rank):
        x = torch.tensor(columns[rank], dtype=dtype)
        dist.all_reduce(x)
        return x.tolist()

    results = world.run(program)
    assert all(result == results[0] for result in results)
    return results[0]


def test_linear_adds_in_rank_order(world_of):
    assert reduce_in(world_of, "linear", [[BIG], [1.0], [1.0], [-BIG]]) == [0.0]
    assert reduce_in(world_of, "linear", [[BIG], [-BIG], [1.0], [1.0]]) == [2.0]


def test_linear_fp32_rounds_16_bit_data_once(world_of):
    columns = [[256.0], [1.0], [1.0]]
    assert reduce_in(world_of, "linear", columns, torch.bfloat16) == [256.0]
    assert reduce_in(world_of, "linear-fp32", columns, torch.bfloat16) == [258.0]


def test_tree_adds_neighbours_first(world_of):
    assert reduce_in(world_of, "tree", [[BIG], [1.0], [1.0], [-BIG]]) == [0.0]
    assert reduce_in(world_of, "tree", [[BIG], [-BIG], [1.0], [1.0]]) == [2.0]
    assert reduce_in(world_of, "tree", [[BIG], [1.0], [-BIG]]) == [0.0]


def test_ring_starts_each_chunk_on_its_own_rank(world_of):
    # One chunk a rank: chunk c is x[c], x[c+1], ...; a one counts only after BIG - BIG is done.
    columns = [[BIG] * 4, [-BIG] * 4, [1.0] * 4, [1.0] * 4]
    assert reduce_in(world_of, "ring", columns) == [2.0, 0.0, 0.0, 1.0]


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
def test_orders_agree_where_every_sum_is_exact(world_of, order, numel):
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


def test_avg_of_the_nccl_ring_multiplies_first(world_of):
    # 7 x bf16(1/3) is 2.34375, and three of them are 7.03125.
    assert averaged(world_of(3, order="nccl-ring"), [7.0] * 3, torch.bfloat16) == 7.03125
    assert averaged(world_of(3, order="ring"), [7.0] * 3, torch.bfloat16) == 7.0


def test_avg_of_symmetric_kernels_multiplies_the_wide_sum(world_of):
    # 513 does not fit bf16, a third of it does: the accumulator is not rounded before.
    values = [256.0, 256.0, 1.0]
    assert averaged(world_of(3, order="nccl-sym"), values, torch.bfloat16) == 171.0


def test_premul_sum_multiplies_each_ranks_contribution(world_of):
    def program(rank):
        x = torch.tensor([8.0 + rank])
        dist.all_reduce(x, op=dist._make_nccl_premul_sum(0.5))
        return x.item()

    assert world_of(3, order="nccl-ring").run(program) == [13.5] * 3


@pytest.mark.parametrize("order", ["gloo", "nccl-sym"])
def test_premul_sum_is_refused_where_the_backend_has_none(world_of, order):
    def program(rank):
        dist.all_reduce(torch.ones(2), op=dist._make_nccl_premul_sum(0.5))

    with pytest.raises(RankFailed, match="PREMUL_SUM"):
        world_of(2, order=order).run(program)


def test_nccl_ring_ends_chunk_c_on_rank_c(world_of):
    # Chunks are whole vectors of 16 bytes: four fp32 numbers.
    columns = [[BIG] * 16, [-BIG] * 16, [1.0] * 16, [1.0] * 16]
    # Chunk 0 is x1, x2, x3, x0: the ones drown. Chunk 1: x2, x3, x0, x1. Chunk 2: x3, x0, x1, x2.
    expected = [0.0] * 4 + [0.0] * 4 + [1.0] * 4 + [2.0] * 4
    assert reduce_in(world_of, "nccl-ring", columns) == expected


def test_symmetric_kernels_start_on_the_rank_that_reduces(world_of):
    # Ranks take turns of 32 elements: x0, x1, ..., then x1, x2, ..., and so on.
    columns = [[BIG] * 128, [-BIG] * 128, [1.0] * 128, [1.0] * 128]
    expected = [2.0] * 32 + [0.0] * 32 + [0.0] * 32 + [1.0] * 32
    assert reduce_in(world_of, "nccl-sym", columns) == expected


def test_symmetric_kernels_round_16_bit_data_once(world_of):
    assert reduce_in(world_of, "nccl-sym", [[256.0], [1.0], [1.0]], torch.bfloat16) == [258.0]


def test_random_trees_have_many_shapes(world_of):
    """Among elements and seeds, both the absorbed and the surviving ones come up."""
    columns = [[BIG] * 7, [-BIG] * 7, [1.0] * 7, [1.0] * 7]
    sums = [reduce_in(world_of, "random-tree", columns, seed=seed) for seed in range(10)]
    assert {each for of_seed in sums for each in of_seed} == {0.0, 1.0, 2.0}


def test_random_trees_follow_the_seed_of_the_world(world_of):
    columns = [[3.0**rank / 7] * 7 for rank in range(5)]

    def run(seed):
        return reduce_in(world_of, "random-tree", columns, torch.bfloat16, seed=seed)

    assert run(1) == run(1)
    assert len({tuple(run(seed)) for seed in range(5)}) > 1
