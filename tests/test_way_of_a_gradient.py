"""Modules on the path of a gradient, from its hook to its reduced shard.

Few, because a reader who follows a gradient reads all of them. Counted on both ranks in one eager
step of stage 1 without planned faults, passing of the baton included.
"""

import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zero_sim.sim import World
from zero_sim.zero import DistributedDataParallel, ZeroConfig

SIM = "zero_sim.sim"


@pytest.fixture(scope="module")
def way():
    """Names of the modules whose functions run from backward to the end of the reduction."""
    modules = set()

    def note(frame, event, arg):
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith("zero_sim."):
            modules.add(name)

    def program(rank):
        module = nn.Linear(4, 2, bias=False)
        ddp = DistributedDataParallel(
            module, config=ZeroConfig(stage=1, divide="none"), group=dist.group.WORLD
        )
        loss = ddp(torch.full((1, 4), rank + 1.0)).sum()
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            loss.backward()
            ddp.finish_grad_sync()
        finally:
            sys.setprofile(before)
        (buffer,) = ddp.buffers
        return buffer.units[0].grad_shard.tolist()

    with World(2) as world:
        shards = world.run(program)
    assert [value for shard in shards for value in shard[:4]] == [3.0] * 8
    return modules


def test_gradient_path_spans_the_hook_and_the_sum(way):
    assert {"zero_sim.zero.data_parallel", "zero_sim.zero.unit"} < way
    assert {f"{SIM}.comm.collectives", f"{SIM}.order"} < way


def test_gradient_passes_at_most_21_modules_of_the_simulator(way):
    assert len({name for name in way if name.startswith(SIM)}) <= 21


def test_gradient_avoids_fault_and_race_modules_by_default(way):
    detours = ("faults", "comm.planned_faults", "inflight.races", "inflight.snapshots")
    assert way.isdisjoint(f"{SIM}.{name}" for name in detours)
