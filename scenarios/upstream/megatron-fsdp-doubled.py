"""Megatron-FSDP doubles gradients if one rank has all shards and a grad_comm_dtype is set.

Run: torchrun --nproc-per-node 1 megatron-fsdp-doubled.py
"""

import contextlib
import types

import torch
import torch.distributed as dist
from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model


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


def sharded(stage, **settings):
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
    model = fully_shard_model(
        torch.nn.Sequential(torch.nn.Linear(1, 2, bias=False)),
        device_mesh=mesh,
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[torch.nn.Linear],
        zero_dp_strategy=stage,
        device=torch.device("cpu"),
        **settings,
    )
    model.ddp_config.gradient_reduce_div_fusion = False  # gloo has no PREMUL_SUM
    return model


dist.init_process_group("gloo")
for stage in (0, 1, 2, 3):
    policy = MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16)
    model = sharded(stage, mixed_precision_policy=policy)
    model(torch.ones(1, 1)).sum().backward()
    (param,) = model.parameters()
    print(
        f"stage {stage}: expected a gradient of 1.0, got {param.grad.to_local().flatten().tolist()}"
    )
dist.destroy_process_group()
