"""The naive version against the engine: equal bits at every stage."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.configs import zero_config
from zero_sim.zero import DistributedDataParallel, DistributedOptimizer
from zero_sim.zero.naive import NaiveZero

STEPS = 3
FACTORY = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.01, foreach=False)


class Squares(nn.Module):
    """Params that do not divide evenly; no matrix product, because its bits depend on addresses."""

    def __init__(self, dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for index, shape in enumerate(((3, 5), (), (7,), (2, 2), (0,))):
            value = torch.rand(shape, generator=generator).to(dtype)
            self.register_parameter(f"p{index}", nn.Parameter(value))

    def forward(self, scale):
        """Return the sum of the squares of all elements, each scaled."""
        return sum((param * scale).float().square().sum() for param in self.parameters())


def loss_of(module, *, step, rank, dtype):
    """Compute the loss of one rank's data."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return module(torch.rand((), generator=generator).to(dtype))


def train_naively(rank, *, dtype):
    """Train a few steps with the naive version; return the params."""
    module = Squares(dtype)
    system = NaiveZero(module, group=dist.group.WORLD, optim_factory=FACTORY)
    for step in range(STEPS):
        loss_of(module, step=step, rank=rank, dtype=dtype).backward()
        system.step()
    return [param.detach().clone() for param in module.parameters()]


def train(rank, *, dtype, stage):
    """Train the same steps with the engine; return the params."""
    config = zero_config(stage=stage, bucket_elems=6)
    ddp = DistributedDataParallel(Squares(dtype), config=config, group=dist.group.WORLD)
    optimizer = DistributedOptimizer(ddp, optim_factory=FACTORY)
    for step in range(STEPS):
        ddp.begin_last_micro_batch()
        loss_of(ddp, step=step, rank=rank, dtype=dtype).backward()
        ddp.finish_grad_sync()
        optimizer.step()
        optimizer.zero_grad()
    return [param.clone() for param in ddp.unsharded_params().values()]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world_size", [1, 3])
def test_engine_equals_naive_version(run_ranks, world_size, dtype, stage):
    plain, _ = run_ranks(world_size, partial(train_naively, dtype=dtype))
    got, _ = run_ranks(world_size, partial(train, dtype=dtype, stage=stage))
    for own, expected in zip(got, plain, strict=True):
        assert all(map(torch.equal, own, expected))
