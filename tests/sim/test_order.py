"""Each order model adds in exactly the order that it names."""

import pytest
import torch
import torch.distributed as dist

BIG = 2.0**26  # fp32 absorbs 1 and 2 beside it, so the place of a 1 in the order decides the sum.


def reduce_in(world_of, order, columns, dtype=torch.float32):
    """All-reduce one tensor a rank, given by `columns[rank]`."""
    world = world_of(len(columns), order=order)

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


def test_the_walkthrough_of_the_ring_all_reduce(world_of):
    firsts = [1.0, 2.0, 1.5, 2.5]

    def program(rank):
        x = torch.arange(8) + firsts[rank]
        dist.all_reduce(x)
        return x

    for total in world_of(4, order="ring").run(program):
        assert total.tolist() == [7.0, 11.0, 15.0, 19.0, 23.0, 27.0, 31.0, 35.0]
        assert (total / 4).tolist() == [1.75 + i for i in range(8)]


@pytest.mark.parametrize("order", ["linear", "linear-fp32", "ring", "tree"])
@pytest.mark.parametrize("numel", [0, 1, 5, 8])
def test_orders_agree_where_every_sum_is_exact(world_of, order, numel):
    assert reduce_in(world_of, order, [[float(r)] * numel for r in range(5)]) == [10.0] * numel


def test_avg_divides_the_sum_once(world_of):
    def program(rank):
        x = torch.tensor([1.0])
        dist.all_reduce(x, op=dist.ReduceOp.AVG)
        return x.item()

    assert world_of(3).run(program) == [1.0] * 3
