"""Megatron-FSDP cuts rows in two where params of one bucket have rows of several lengths.

Run: torchrun --nproc-per-node 2 megatron-fsdp-rows.py
"""

import contextlib
import types

import torch
import torch.distributed as dist
from megatron_fsdp import fully_shard_model


class Stream:
    """Of a GPU, in name: what is asked of one is done when it is asked."""

    def wait_stream(self, other): ...

    def record_event(self):
        return types.SimpleNamespace(wait=lambda: None)


# Where the library calls torch.cuda there is nothing to be done on a CPU.
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
