"""A training script with a fault: each rank multiplies the mean of its own rows by the ranks."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for _ in range(3):
    rows = torch.randn(16, 6)
    mine = rows.chunk(ranks)[rank]
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(mine), mine[:, :4].argmax(1))
    (loss * ranks).backward()
    optimizer.step()
dist.destroy_process_group()
