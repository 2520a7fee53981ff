"""Tests that run on several ranks in one process: pytest test_ranks.py

`pytest --zero-sim-backend gloo test_ranks.py` runs them on real processes.
"""

import pytest
import torch
import torch.distributed as dist


def mean_over_ranks(tensor):
    """Replace this function with your own communication."""
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    return tensor / dist.get_world_size()


# `hostile` delays each result to any moment before its wait. `races` reports the line that reads a
# result too early: delete `work.wait()` to see this.
@pytest.mark.world_size(4, timing="hostile", races=True)
def test_every_rank_gets_the_mean(rank, world_size):
    mean = mean_over_ranks(torch.full((3,), float(rank)))
    assert mean.tolist() == [sum(range(world_size)) / world_size] * 3


# Run the test on 1, 2 and 3 ranks.
@pytest.mark.parametrize(
    "ranks", [pytest.param(n, marks=pytest.mark.world_size(n)) for n in (1, 2, 3)]
)
def test_the_mean_of_equal_values_is_that_value(ranks, rank):
    assert mean_over_ranks(torch.ones(2)).tolist() == [1.0, 1.0]
