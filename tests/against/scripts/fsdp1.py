"""FullyShardedDataParallel with flat params, clipping and accumulation; `fault` plants a fault."""

import contextlib

import torch
import torch.distributed as dist
from gpt import GPT, Block, rows_of
from setting import OPTIMIZERS, setting
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

use = setting(
    dtype="float32", optimizer="adamw", size=0, clip=0.5, strategy="FULL_SHARD", original=1
)
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = FullyShardedDataParallel(
    GPT(),
    auto_wrap_policy=ModuleWrapPolicy({Block}),
    sharding_strategy=ShardingStrategy[use.strategy],
    mixed_precision=MixedPrecision(param_dtype=use.dtype, reduce_dtype=torch.float32),
    use_orig_params=bool(use.original),
    device_id=torch.device("cpu"),
)
optimizer = OPTIMIZERS[use.optimizer](model.parameters())
for step in range(4):
    optimizer.zero_grad()
    mine = rows_of(step, rank, ranks)
    micros = mine.split(use.size) if use.size else [mine]
    for index, micro in enumerate(micros):
        syncs = index == len(micros) - 1 and use.fault != "never-synced"
        with contextlib.nullcontext() if syncs else model.no_sync():
            loss = model(micro[:, :-1], micro[:, 1:]) / len(micros)
            (loss * (ranks if use.fault == "sum-for-mean" else 1)).backward()
    if use.clip:
        if use.fault == "norm-of-shard":
            torch.nn.utils.clip_grad_norm_(model.parameters(), use.clip)
        else:
            model.clip_grad_norm_(use.clip)
    if use.fault == "lr-on-a-rank" and rank == 1:
        optimizer.param_groups[0]["lr"] *= 1 + 1e-6
    optimizer.step()
dist.destroy_process_group()
