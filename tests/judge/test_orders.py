"""Sums in every order: the simulated cluster and the oracle agree."""

from typing import get_args

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from zero_sim.reference import SumSite, SumSpan
from zero_sim.reference.adding import add_ranks
from zero_sim.scenario.spec import OrderName, RunSpec, SystemSpec, TopologySpec, WorldSpec

ORDERS = get_args(OrderName)
SEED = 11
BF16 = torch.bfloat16


def brought(rank, elems, dtype):
    generator = torch.Generator().manual_seed(rank + 100 * elems)
    return (torch.randn(elems, generator=generator) * 3.0**rank).to(dtype)


def owed(parts, order, **site):
    """Return the oracle's sum of consecutive elements, from all ranks' contributions."""
    stop = parts[0].numel()
    spans = [SumSpan(start=0, stop=stop, site=SumSite(**site))]
    return add_ranks(parts, order=order, spans=spans, seed=SEED)


def assert_equal(got, expected):
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected)


CASES = [
    (count, elems, dtype)
    for count in (2, 3, 4, 7)
    for elems, dtype in ((0, BF16), (1, BF16), (9, torch.float32), (1001, BF16), (257, torch.half))
]
"""Full product, for `test_all_reduce` only."""

SAMPLE = [(2, 1, BF16), (3, 9, torch.float32), (4, 257, torch.half), (7, 1001, BF16)]
"""Each world size, element count and dtype of CASES once."""


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("count", "elems", "dtype"), CASES)
def test_all_reduce(world_of, order, count, elems, dtype):
    def program(rank):
        x = brought(rank, elems, dtype)
        dist.all_reduce(x)
        return x

    parts = [brought(rank, elems, dtype) for rank in range(count)]
    expected = owed(parts, order, kind="all_reduce", elems=elems, offset=0)
    for got in world_of(count, order=order, seed=SEED).run(program):
        assert_equal(got, expected)


@pytest.mark.parametrize("order", ["gloo", "nccl-ring"])
def test_all_reduce_with_several_loops_and_segments(world_of, order):
    elems = 5_000_011

    def program(rank):
        x = brought(rank, elems, BF16)
        dist.all_reduce(x)
        return x if rank == 0 else None

    parts = [brought(rank, elems, BF16) for rank in range(3)]
    expected = owed(parts, order, kind="all_reduce", elems=elems, offset=0)
    assert_equal(world_of(3, order=order, seed=SEED).run(program)[0], expected)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("count", "elems", "dtype"), SAMPLE)
def test_flat_reduce_scatter(world_of, order, count, elems, dtype):
    def program(rank):
        out = torch.empty(elems, dtype=dtype)
        dist.reduce_scatter_single(out, brought(rank, elems * count, dtype))
        return out

    wholes = [brought(rank, elems * count, dtype) for rank in range(count)]
    for rank, got in enumerate(world_of(count, order=order, seed=SEED).run(program)):
        parts = [whole[rank * elems : (rank + 1) * elems] for whole in wholes]
        site = {"elems": elems * count, "offset": rank * elems, "ends_on": rank}
        assert_equal(got, owed(parts, order, kind="reduce_scatter", **site))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("count", "elems", "dtype"), SAMPLE)
def test_reduce_scatter_of_a_list(world_of, order, count, elems, dtype):
    sizes = [elems + rank for rank in range(count)]

    def program(rank):
        out = torch.empty(sizes[rank], dtype=dtype)
        dist.reduce_scatter(out, [brought(rank, size, dtype) for size in sizes])
        return out

    for rank, got in enumerate(world_of(count, order=order, seed=SEED).run(program)):
        parts = [brought(other, sizes[rank], dtype) for other in range(count)]
        site = {"elems": sizes[rank], "offset": 0, "ends_on": rank}
        assert_equal(got, owed(parts, order, kind="reduce_scatter_list", **site))


@pytest.mark.parametrize("order", ORDERS)
def test_rooted_reduce(world_of, order):
    def program(rank):
        x = brought(rank, 77, BF16)
        dist.reduce(x, dst=2)
        return x

    got = world_of(5, order=order, seed=SEED).run(program)[2]
    parts = [brought(rank, 77, BF16) for rank in range(5)]
    assert_equal(got, owed(parts, order, kind="reduce", elems=77, offset=0, ends_on=2))


@pytest.mark.parametrize("order", ORDERS)
def test_coalesced_all_reduce(world_of, order):
    sizes = [5, 64, 33]

    def program(rank):
        tensors = [brought(rank, size, BF16) for size in sizes]
        with _coalescing_manager():
            for tensor in tensors:
                dist.all_reduce(tensor)
        return tensors

    got = world_of(4, order=order, seed=SEED).run(program)[3]
    for i, size in enumerate(sizes):
        parts = [brought(rank, size, BF16) for rank in range(4)]
        joined = {"joined_elems": sum(sizes), "joined_offset": sum(sizes[:i])}
        assert_equal(got[i], owed(parts, order, kind="all_reduce", elems=size, offset=0, **joined))


@pytest.mark.parametrize("order", ORDERS)
def test_spans_of_a_call_add_like_the_whole_call(order):
    wholes = [brought(rank, 300, BF16) for rank in range(5)]
    expected = owed(wholes, order, kind="all_reduce", elems=300, offset=0)
    for start, stop in ((0, 1), (1, 40), (40, 299), (299, 300)):
        parts = [whole[start:stop] for whole in wholes]
        got = owed(parts, order, kind="all_reduce", elems=300, offset=start)
        assert_equal(got, expected[start:stop])


def test_random_trees_depend_on_the_seed(world_of):
    parts = [brought(rank, 300, BF16) for rank in range(5)]
    spans = [SumSpan(start=0, stop=300, site=SumSite(kind="all_reduce", elems=300, offset=0))]
    one, other = (add_ranks(parts, order="random-tree", spans=spans, seed=seed) for seed in (1, 2))
    assert not torch.equal(one, other)


@pytest.mark.parametrize("order", ORDERS)
def test_dp_cp_groups_share_the_order_seed_of_the_world(judged, order):
    """Each group has its own data seed, and counts its ranks from 0."""
    result = judged(
        world=WorldSpec(size=10, order=order),
        topology=TopologySpec(tp=2),
        system=SystemSpec(bucket_elems=50),
        run=RunSpec(steps=1, seed=3),
    )
    assert result.verdict == "pass", result.findings
