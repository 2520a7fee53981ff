"""Fixture that runs a program with a contract violation."""

import pytest
import torch
import torch.distributed as dist

from zero_sim.sim import ContractViolation


def _total_of_ranks(rank):
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)
    return x.item()


@pytest.fixture
def violation_of():
    """Function that runs a wrong program, checks that the world stays usable, returns the error."""

    def run(world, program, aspect):
        with pytest.raises(ContractViolation) as caught:
            world.run(program)
        violation = caught.value
        assert violation.aspect == aspect, str(violation)
        size = world.world_size
        assert world.run(_total_of_ranks) == [sum(range(size))] * size
        return violation

    return run
