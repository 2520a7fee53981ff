"""Collectives of the simulated world, compared with dense formulas over all ranks' inputs.

The formulas take Python floats, one element at a time, and share only the definition of each
order with the simulator.
"""

import warnings

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from zero_sim.sim import World
from zero_sim.testing.worlds import world_settings

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
SIZES = (1, 2, 3, 4, 5, 7)
EAGER = {"schedule": "round-robin", "timing": "eager", "seed": 0}


@pytest.fixture(scope="module")
def worlds():
    opened = {size: World(size) for size in SIZES}
    yield opened
    for world in opened.values():
        world.close()


def add(a, b, dtype):
    """Add two numbers with one IEEE addition in the dtype."""
    return (torch.tensor([a], dtype=dtype) + torch.tensor([b], dtype=dtype)).item()


def chain(values, dtype):
    total = values[0]
    for value in values[1:]:
        total = add(total, value, dtype)
    return total


def reduced(values, order, dtype, ends_on):
    """Sum one element's contributions, given in rank order, under a named order."""
    if order == "linear-fp32":
        wide = torch.float32 if dtype == torch.bfloat16 else dtype
        return (
            torch.tensor([chain(values, wide)]).to(dtype).item()
            if wide != torch.float64
            else chain(values, wide)
        )
    if order == "ring":
        return chain(values[ends_on + 1 :] + values[: ends_on + 1], dtype)
    if order == "tree":
        level = list(values)
        while len(level) > 1:
            pairs = [level[i : i + 2] for i in range(0, len(level), 2)]
            level = [add(*pair, dtype) if len(pair) == 2 else pair[0] for pair in pairs]
        return level[0]
    return chain(values, dtype)


@st.composite
def cases(draw):
    size = draw(st.sampled_from(SIZES))
    per_rank = draw(st.integers(0, 4))
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    order = draw(st.sampled_from(["linear", "linear-fp32", "ring", "tree"]))
    element = st.floats(-60000, 60000, width=16).map(lambda x: x + 0.0)
    rows = [
        torch.tensor(
            draw(st.lists(element, min_size=size * per_rank, max_size=size * per_rank)), dtype=dtype
        )
        for _ in range(size)
    ]
    return size, per_rank, dtype, order, rows


@given(case=cases())
def test_reduce_scatter_matches_formula(worlds, case):
    size, per_rank, dtype, order, rows = case
    world = worlds[size]
    world.configure(order=order)

    def program(rank):
        out = torch.empty(per_rank, dtype=dtype)
        dist.reduce_scatter_single(out, rows[rank].clone())
        return out.tolist()

    expected = [
        [
            reduced([row[d * per_rank + i].item() for row in rows], order, dtype, ends_on=d)
            for i in range(per_rank)
        ]
        for d in range(size)
    ]
    assert world.run(program) == expected


@given(case=cases(), extra=st.integers(0, 3))
def test_all_reduce_matches_formula(worlds, case, extra):
    size, per_rank, dtype, order, rows = case
    numel = max(0, size * per_rank - extra)
    world = worlds[size]
    world.configure(order=order)

    def program(rank):
        x = rows[rank][:numel].clone()
        dist.all_reduce(x)
        return x.tolist()

    chunk = -(-numel // size)
    expected = [
        reduced([row[i].item() for row in rows], order, dtype, ends_on=(i // chunk - 1) % size)
        for i in range(numel)
    ]
    assert world.run(program) == [expected] * size


@given(case=cases(), data=st.data(), late=world_settings(ready_max=max(SIZES)))
def test_data_movement_changes_no_bit(worlds, case, data, late):
    size, per_rank, dtype, _, rows = case
    root = data.draw(st.integers(0, size - 1))
    world = worlds[size]
    world.configure(**late)

    def program(rank):
        gathered = torch.empty(size * size * per_rank, dtype=dtype)
        dist.all_gather_single(gathered, rows[rank])
        swapped = torch.empty(size * per_rank, dtype=dtype)
        dist.all_to_all_single(swapped, rows[rank])
        shared = rows[rank].clone()
        dist.broadcast(shared, src=root)
        return gathered, swapped, shared

    for rank, (gathered, swapped, shared) in enumerate(world.run(program)):
        assert torch.equal(gathered, torch.cat(rows))
        mine = [row[rank * per_rank : (rank + 1) * per_rank] for row in rows]
        assert torch.equal(swapped, torch.cat(mine))
        assert torch.equal(shared, rows[root])
    world.configure(**EAGER)


@given(case=cases(), late=world_settings(picks_max=30, ready_max=max(SIZES)))
def test_schedule_and_timing_change_no_bit(worlds, case, late):
    size, per_rank, dtype, order, rows = case
    world = worlds[size]

    def program(rank):
        first, second = rows[rank].clone(), torch.empty(per_rank, dtype=dtype)
        works = [
            dist.all_reduce(first, async_op=True),
            dist.reduce_scatter_single(second, rows[rank].clone(), async_op=True),
        ]
        for work in works if rank % 2 else works[::-1]:
            work.wait()
        return first.tolist(), second.tolist()

    world.configure(order=order, **EAGER)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = world.run(program)
        world.configure(**late)
        assert world.run(program) == expected
    world.configure(**EAGER)
