"""Megatron-FSDP keeps the params of the first step without overlap_param_gather.

Run: torchrun --nproc-per-node 2 megatron-fsdp-stale-params.py
"""

import contextlib
import types

import torch
import torch.distributed as dist
from megatron_fsdp import fully_shard_model, fully_shard_optimizer


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
for stage in (1, 2):
    for overlap in (True, False):
        model = sharded(stage, overlap_param_gather=overlap)
        with torch.no_grad():
            for param in model.parameters():
                param.to_local().fill_(1.0)
        model.install_optimized_model_weights()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        fully_shard_optimizer(optimizer)
        for expected in (2.0, 1.5, 1.0):
            output = model(torch.ones(1, 1)).sum()
            if dist.get_rank() == 0:
                print(f"stage {stage}, overlap {overlap}: expected {expected}, got {output.item()}")
            output.backward()
            optimizer.step()
            optimizer.zero_grad()
dist.destroy_process_group()
