"""A data-parallel training script for torchrun. zero_sim runs it without changes:

    zero-sim torchrun --against 1 --nproc-per-node 2 train.py

compares params, gradients and optimizer state on 2 ranks with a run on 1 rank. To see a fault,
delete the line with `all_reduce`.
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

for _ in range(3):
    # All ranks draw the global batch, and each takes its own rows.
    rows = torch.randn(16, 6)
    mine = rows.chunk(ranks)[rank]
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(mine), mine[:, :4].argmax(1))
    loss.backward()
    for param in model.parameters():
        dist.all_reduce(param.grad)
        param.grad /= ranks
    optimizer.step()

dist.destroy_process_group()
