"""Two gloo processes that train with each system and write its torch.profiler trace.

python -m tests.calculators.real_traces FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from zero_sim.scenario.spec import ModelSpec, Scenario, SystemSpec, WorldSpec
from zero_sim.targets import complete, find_target

RANKS = 2
STEPS = 3
SYSTEMS = ("ddp", "zero-redundancy", "fsdp2", "stage-1", "stage-2", "stage-3")
BUCKET_MB = 0.002
"""Size that gives a few buckets, which DDP rebuilds after its first step."""


def main(folder: str) -> None:
    """Write `SYSTEM.json` of rank 0 for each system."""
    mp.spawn(_rank, (folder,), nprocs=RANKS)


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    for system in SYSTEMS:
        step = _step_of(system)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
            for number in range(STEPS):
                torch.manual_seed(RANKS * number + rank)
                step(torch.randn(4, 8))
        if rank == 0:
            recorded.export_chrome_trace(str(Path(folder, f"{system}.json")))
    dist.destroy_process_group()


def _step_of(system: str) -> Callable[[torch.Tensor], None]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)) for _ in range(3)))
    if system.startswith("stage"):
        return _own_step(model, stage=int(system[-1]))
    adam = torch.optim.AdamW
    if system == "fsdp2":
        for block in model:
            fully_shard(block)
        fully_shard(model)
        optimizer: torch.optim.Optimizer = adam(model.parameters())
    else:
        model = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
        optimizer = (
            adam(model.parameters())
            if system == "ddp"
            else ZeroRedundancyOptimizer(model.parameters(), optimizer_class=adam)
        )

    def step(rows: torch.Tensor) -> None:
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _own_step(model: nn.Module, *, stage: int) -> Callable[[torch.Tensor], None]:
    case = Scenario(
        schema=1,
        name="case",
        model=ModelSpec(name="mlp"),
        world=WorldSpec(size=RANKS),
        system=SystemSpec(stage=stage, bucket_elems=300),
    )
    assert dist.group.WORLD is not None
    built = find_target("zero_sim").build(model, scenario=case, group=dist.group.WORLD)
    engine = complete(built)

    def step(rows: torch.Tensor) -> None:
        engine.zero_grad()
        engine.start_micro_batch(last=True)
        engine.backward(engine.forward(rows).square().mean(), last_micro=True, rows=len(rows))
        engine.step(lr_factor=1.0)

    return step


if __name__ == "__main__":
    main(*sys.argv[1:])
