"""Megatron-FSDP reduces gradients twice at stages 0 and 1 without overlap_grad_reduce.

Run: torchrun --nproc-per-node 2 megatron-fsdp-reduced-twice.py
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
for stage in (0, 1):
    for overlap in (True, False):
        model = sharded(stage, overlap_grad_reduce=overlap)
        # Gradients are 1 on rank 0 and 3 on rank 1.
        model(torch.full((1, 1), 1.0 + 2.0 * dist.get_rank())).sum().backward()
        (param,) = model.parameters()
        got = param.grad.to_local().flatten().tolist()
        print(f"stage {stage}, overlap {overlap}, rank {dist.get_rank()}: expected 2.0, got {got}")
dist.destroy_process_group()
