"""FSDP2 by block with mixed precision, accumulation, clipping and a DCP checkpoint.

`replicas` makes a 2-D mesh (HSDP); `fault` plants a fault.
"""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt import GPT, rows_of
from setting import OPTIMIZERS, setting
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

use = setting(
    dtype="bfloat16", optimizer="adamw", size=0, clip=0.5, replicas=1, reshard=1, load=1, by=0
)
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
replicas = use.replicas if ranks % use.replicas == 0 else 1
mesh = init_device_mesh("cpu", (ranks,))
if replicas > 1:
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (replicas, ranks // replicas), mesh_dim_names=names)
torch.manual_seed(0)
model = GPT()
policy = MixedPrecisionPolicy(param_dtype=use.dtype, reduce_dtype=torch.float32)
options = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": bool(use.reshard)}
if use.by:
    # Sharded along the last dimension.
    from torch.distributed.tensor import Shard

    options["shard_placement_fn"] = lambda p: Shard(p.ndim - 1)
if use.fault == "ignored":
    options["ignored_params"] = {model.blocks[1].norm_1.weight}
for block in model.blocks:
    fully_shard(block, **options)
fully_shard(model, **options)
if use.fault == "divisor-of-a-block" and ranks > 1:
    model.blocks[1].set_gradient_divide_factor(ranks + 1)
optimizer = OPTIMIZERS[use.optimizer](model.parameters())
params = list(model.parameters())
for step in range(4):
    optimizer.zero_grad()
    mine = rows_of(step, rank, ranks)
    micros = mine.split(use.size) if use.size else [mine]
    for index, micro in enumerate(micros):
        is_last = index == len(micros) - 1
        model.set_requires_gradient_sync(is_last)
        model.set_is_last_backward(is_last)
        if use.fault == "block-never-synced" and ranks > 1:
            model.blocks[0].set_requires_gradient_sync(False)
        loss = model(micro[:, :-1], micro[:, 1:])
        if use.fault == "sum-of-losses":
            loss = loss * len(micros)
        (loss / len(micros)).backward()
    if use.clip:
        if use.fault == "norm-of-shard":
            grads = [p.grad.to_local() for p in params]
            torch.nn.utils.clip_grads_with_norm_(
                params, use.clip, torch.nn.utils.get_total_norm(grads)
            )
        else:
            torch.nn.utils.clip_grad_norm_(params, use.clip)
    if use.fault == "lr-on-a-rank" and rank == 1:
        optimizer.param_groups[0]["lr"] *= 1 + 1e-6
    if use.fault == "element" and rank == ranks - 1:
        params[4].grad.to_local().view(-1)[0] *= 1.001
    optimizer.step()
    if step == 1 and use.load:
        state_model, state_optimizer = get_state_dict(model, optimizer)
        dcp.save({"model": state_model, "optimizer": state_optimizer}, checkpoint_id="saved")
    if step == 2 and use.load:
        state_model, state_optimizer = get_state_dict(model, optimizer)
        content = {"model": state_model, "optimizer": state_optimizer}
        dcp.load(content, checkpoint_id="saved")
        if use.fault == "shifted-load" and rank:
            local = content["model"]["blocks.0.up.weight"].to_local()
            local.copy_(local.flatten().roll(1).view_as(local))
        if use.fault == "steps-lost-on-a-rank" and rank:
            for state in content["optimizer"]["state"].values():
                state["step"].zero_()
        set_state_dict(
            model,
            optimizer,
            model_state_dict=content["model"],
            optim_state_dict=content["optimizer"],
        )
dist.destroy_process_group()
