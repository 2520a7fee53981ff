"""Megatron-FSDP scales accumulated gradients again under HSDP if one rank has all shards.

Run: torchrun --nproc-per-node 2 megatron-fsdp-scaled-again.py
"""

import contextlib
import types

import torch
import torch.distributed as dist
from megatron_fsdp import fully_shard_model


class Stream:
    """Stand-in for a GPU's stream. On a CPU, calls are done when they return."""

    def wait_stream(self, other): ...

    def record_event(self):
        return types.SimpleNamespace(wait=lambda: None)


# On a CPU, the library's calls of torch.cuda have nothing to do.
torch.cuda.current_device = lambda: 0
torch.cuda.Stream = torch.cuda.current_stream = Stream
torch.cuda.stream = lambda stream: contextlib.nullcontext()
torch.Tensor.cuda = lambda tensor: tensor


dist.init_process_group("gloo")
for stage in (1, 2, 3):
    mesh = dist.init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("outer", "dp", "tp"))
    model = fully_shard_model(
        torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False)),
        device_mesh=mesh,
        dp_outer_dim="outer",
        dp_shard_dim="dp",
        tp_dim="tp",
        hybrid_fsdp_group=mesh[("outer", "dp")]._flatten("hsdp").get_group(),
        fsdp_unit_modules=[torch.nn.Linear],
        zero_dp_strategy=stage,
        device=torch.device("cpu"),
    )
    model.ddp_config.gradient_reduce_div_fusion = False  # gloo has no PREMUL_SUM
    # Every micro-batch has a gradient of 1 on both ranks.
    for last in (False, True):
        model.set_model_auto_sync(last)
        model(torch.ones(1, 2)).sum().backward()
    (param,) = model.parameters()
    got = param.grad.to_local().flatten().tolist()
    print(f"stage {stage}, rank {dist.get_rank()}: expected 1 + 1, got {got}")
dist.destroy_process_group()
