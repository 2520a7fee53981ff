"""Megatron-FSDP cuts a row in two if params of one bucket have rows of different lengths.

Run: torchrun --nproc-per-node 2 megatron-fsdp-rows.py
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


class Both(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.long = torch.nn.Parameter(torch.ones(1, 3))
        self.short = torch.nn.Parameter(torch.ones(2, 2))


try:
    fully_shard_model(
        Both(),
        device_mesh=dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp")),
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[Both],
        zero_dp_strategy=1,
        device=torch.device("cpu"),
    )
    print("expected a model, got one")
except RuntimeError as error:
    print(f"rank {dist.get_rank()}: expected a model, got RuntimeError: {error}")
    dist.barrier()
dist.destroy_process_group()
