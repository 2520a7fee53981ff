"""Tensor parallelism within blocks, with FSDP2 over the other mesh dimension; plants faults.

`tp` ranks share each block. The head is not sharded by TP.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from setting import OPTIMIZERS, setting
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

use = setting(optimizer="adamw", tp=2, clip=0.5, fsdp=1)
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
tp = min(use.tp, ranks)
mesh = init_device_mesh("cpu", (ranks // tp, tp), mesh_dim_names=("dp", "tp"))
ROWS = 48


class Feed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 16), Feed(), Feed(), nn.Linear(16, 4))
if tp > 1:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in (model[1], model[2]):
        parallelize_module(block, mesh["tp"], plan)
if use.fsdp:
    for block in (model[1], model[2]):
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
if use.fault == "shard-scaled" and ranks > 1:
    with torch.no_grad():
        weight = model[1].up.weight
        if mesh.get_local_rank("tp") == 1:
            weight.to_local().mul_(1 + 1e-6)
params = list(model.parameters())
optimizer = OPTIMIZERS[use.optimizer](params)
for step in range(4):
    draws = torch.Generator().manual_seed(100 + step)
    rows = torch.randn(ROWS, 12, generator=draws).chunk(ranks // tp)[mesh.get_local_rank("dp")]
    optimizer.zero_grad()
    loss = (model(rows) - rows[:, :4].sin()).square().mean()
    loss.backward()
    if use.fault == "norm-reduced-twice":
        dist.all_reduce(
            model[1].norm.weight.grad.to_local() if use.fsdp else model[1].norm.weight.grad
        )
    if use.clip:
        norm = torch.nn.utils.get_total_norm([p.grad for p in params]) if tp == 1 else None
        if norm is None:
            squares = [torch.nn.utils.get_total_norm([p.grad]) for p in params]
            whole = [
                each.full_tensor() if hasattr(each, "full_tensor") else each for each in squares
            ]
            norm = torch.stack(whole).norm()
        elif hasattr(norm, "full_tensor"):
            norm = norm.full_tensor()
        scale = (use.clip / (norm + 1e-6)).clamp(max=1.0)
        for p in params:
            p.grad.mul_(scale)
    optimizer.step()
dist.destroy_process_group()
