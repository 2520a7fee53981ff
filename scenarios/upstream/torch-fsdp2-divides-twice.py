"""fully_shard with a divide factor and forced sums divides twice if one rank has all shards.

Run: torchrun --nproc-per-node 1 torch-fsdp2-divides-twice.py
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = fully_shard(torch.nn.Linear(1, 1, bias=False))
model.set_force_sum_reduction_for_comms(True)
model.set_gradient_divide_factor(2.0)
model(torch.ones(1, 1)).sum().backward()
print(f"expected a gradient of 1 / 2, got {model.weight.grad.to_local().item()}")
dist.destroy_process_group()
