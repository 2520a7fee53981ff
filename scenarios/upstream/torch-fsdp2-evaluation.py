"""fully_shard keeps params that a forward under no_grad gathered, and trains with stale values.

Run: torchrun --nproc-per-node 2 torch-fsdp2-evaluation.py
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = fully_shard(torch.nn.Linear(1, 2, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
inputs = torch.ones(1, 1)
model(inputs).sum().backward()
with torch.no_grad():
    model(inputs)
optimizer.step()
output = model(inputs).detach().flatten()
model.reshard()
if dist.get_rank() == 0:
    print(f"the forward gave {[round(x, 4) for x in output.tolist()]}", end="; ")
unsharded = model.weight.full_tensor().detach().flatten()
if dist.get_rank() == 0:
    print(f"the params are {[round(x, 4) for x in unsharded.tolist()]}")
dist.destroy_process_group()
