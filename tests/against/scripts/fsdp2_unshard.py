"""FSDP2 from the meta device, with params offloaded and unsharded before the forward.

`offload` and `reshard` set the policies; `fault` plants a fault.
"""

import torch
import torch.distributed as dist
from setting import setting
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

use = setting(offload=0, reshard=1)
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
with torch.device("meta"):
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 6), torch.nn.Linear(6, 2))
    model.bfloat16()
options = {
    "reshard_after_forward": bool(use.reshard),
    "offload_policy": CPUOffloadPolicy(pin_memory=False) if use.offload else OffloadPolicy(),
    "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}
fully_shard(model[1], **options)
fully_shard(model, **options)
model.to_empty(device="cpu")
for module in model:
    module.reset_parameters()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
for step in range(2):
    model.unshard()
    draws = torch.Generator().manual_seed(step)
    mine = torch.randn(8, 4, generator=draws).chunk(ranks)[rank]
    (model(mine).float() - mine[:, :2].sin()).square().mean().backward()
    if use.fault == "shard" and rank:
        next(model.parameters()).grad.to_local().mul_(2)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
