"""HYBRID_SHARD on a mesh with a shard dimension of 1 never reduces gradients over the replicas.

Run: torchrun --nproc-per-node 2 torch-fsdp1-hybrid-alone.py
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

dist.init_process_group("gloo")
rank = dist.get_rank()
model = FullyShardedDataParallel(
    torch.nn.Linear(1, 1, bias=False),
    device_mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")),
    sharding_strategy=ShardingStrategy.HYBRID_SHARD,
    device_id=torch.device("cpu"),
    use_orig_params=True,
)
model(torch.full((1, 1), 1.0 + rank)).sum().backward()
(grad,) = (param.grad.item() for param in model.parameters())
print(f"rank {rank}: expected a gradient of (1 + 2) / 2, got {grad}")
dist.destroy_process_group()
