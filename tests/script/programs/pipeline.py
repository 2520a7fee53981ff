"""A pipeline like that of torch's tutorial: one stage per rank, scheduled micro-batches."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

dim, micro_batches = 6, 4

dist.init_process_group("gloo")
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device("cpu")


def target_loss(output, target):
    return nn.functional.mse_loss(output, target)


for schedule_class in (ScheduleGPipe, Schedule1F1B):
    torch.manual_seed(rank)
    stage_module = nn.Sequential(nn.Linear(dim, dim), nn.Tanh())
    stage = PipelineStage(stage_module, rank, world_size, device)
    schedule = schedule_class(stage, n_microbatches=micro_batches, loss_fn=target_loss)
    optimizer = torch.optim.SGD(stage_module.parameters(), lr=0.1)
    torch.manual_seed(50)
    for step in range(2):
        x, y = torch.rand(8, dim), torch.rand(8, dim)
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        elif rank == world_size - 1:
            losses = []
            schedule.step(target=y, losses=losses)
            print(f"{schedule_class.__name__} step {step} loss {torch.stack(losses).mean()!r}")
        else:
            schedule.step()
        optimizer.step()
    print("grad", repr(stage_module[0].weight.grad.double().sum().item()))
dist.barrier()
dist.destroy_process_group()
