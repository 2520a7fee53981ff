"""How the tests of the contract run a program that breaks it."""

import time

import pytest
import torch
import torch.distributed as dist

from zero_sim.sim import ContractViolation

SECONDS_MAX = 5.0
"""Far more than a violation may take: what is tested is that nothing waits for a timeout."""


def _total_of_ranks(rank):
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)
    return x.item()


@pytest.fixture
def violation_of():
    """Run a program that is wrong; the violation, after seeing that the world goes on."""

    def run(world, program, aspect):
        started = time.perf_counter()
        with pytest.raises(ContractViolation) as caught:
            world.run(program)
        seconds = time.perf_counter() - started
        violation = caught.value
        assert violation.aspect == aspect, str(violation)
        assert seconds < SECONDS_MAX
        size = world.world_size
        assert world.run(_total_of_ranks) == [sum(range(size))] * size
        return violation

    return run
