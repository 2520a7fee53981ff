"""fully_shard_optimizer of Megatron-FSDP makes a step with zero gradients.

Run: torchrun --nproc-per-node 1 megatron-fsdp-initial-step.py
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
model = sharded(3)
(param,) = model.parameters()
with torch.no_grad():
    param.to_local().fill_(1.0)
model.install_optimized_model_weights()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.5)
fully_shard_optimizer(optimizer)
begun = param.to_local().flatten().tolist()
print(f"at the beginning: expected params of 1.0, got {begun}")
(state,) = optimizer.state.values()
print(f"at the beginning: expected no step, got {state['step'].item()}")
model(torch.ones(1, 1)).sum().backward()
optimizer.step()
(state,) = optimizer.state.values()
print(f"after a step: expected 1 step, got {state['step'].item()}")
print(f"after a step: expected params of 0.25, got {param.to_local().flatten().tolist()}")
dist.destroy_process_group()
