"""A real group of one in this process, and simulated ranks for the rest."""

from __future__ import annotations

import pytest
import torch.distributed as dist


@pytest.fixture
def lone_group(tmp_path):
    """A gloo group with this process as its only rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def run_ranks(world_of):
    """Run `program(rank)` on simulated ranks; returns the results in rank order and the log."""

    def run(world_size, program):
        world = world_of(world_size)
        return world.run(program), world.log

    return run
