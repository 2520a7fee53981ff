"""DDP with static_graph fails if the first backward is under no_sync.

Run: torchrun --nproc-per-node 1 torch-ddp-static-graph.py
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(1, 1)
ddp = torch.nn.parallel.DistributedDataParallel(model, static_graph=True)
try:
    with ddp.no_sync():
        ddp(torch.ones(1, 1)).sum().backward()
    ddp(torch.ones(1, 1)).sum().backward()
    print("trained, as expected")
except RuntimeError as error:
    print(f"RuntimeError: {str(error).splitlines()[0]}")
dist.destroy_process_group()
