"""Sums of full gradients: units that issue them, and their stages."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.configs import zero_config
from zero_sim.errors import UsageError
from zero_sim.zero import DistributedDataParallel, Seams
from zero_sim.zero.variants.root_reduce import AllReducedUnit, SummedAtFirstUnit


def wrap(unit, **config):
    return DistributedDataParallel(
        nn.Linear(2, 2, bias=False),
        config=zero_config(divide="none", **config),
        group=dist.group.WORLD,
        seams=Seams(unit=unit),
    )


@pytest.mark.parametrize(
    ("unit", "stage"), [(AllReducedUnit, 1), (SummedAtFirstUnit, 0), (SummedAtFirstUnit, 3)]
)
def test_every_rank_gets_its_shard_of_the_sum(world_of, unit, stage):
    def program(rank):
        ddp = wrap(unit, stage=stage)
        ddp.begin_last_micro_batch()
        ddp(torch.full((1, 2), rank + 1.0)).sum().backward()
        ddp.finish_grad_sync()
        (buffer,) = ddp.buffers
        (param,) = ddp.params.values()
        return set(buffer.get_grad_shard(param).tolist())

    assert world_of(2).run(program) == [{3.0}] * 2


def test_all_reduced_unit_at_stage_0_is_refused(world_of):
    """Stage 0 already sums to all ranks, so the unit would have no effect."""

    def program(rank):
        with pytest.raises(UsageError, match=r"stage 1, 2 or 3 with AllReducedUnit.*bucket 0 of"):
            wrap(AllReducedUnit, stage=0)

    world_of(1).run(program)
