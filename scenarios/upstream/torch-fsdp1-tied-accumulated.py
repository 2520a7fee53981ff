"""FSDP1 with NO_SHARD raises if it accumulates 16-bit gradients of a tied param.

Run: torchrun --nproc-per-node 2 torch-fsdp1-tied-accumulated.py
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy


class Layers(torch.nn.Module):
    def __init__(self, *, tied):
        super().__init__()
        self.first, self.again = (torch.nn.Linear(1, 1, bias=False) for _ in range(2))
        if tied:
            self.again.weight = self.first.weight

    def forward(self, x):
        return self.again(self.first(x)).sum()


dist.init_process_group("gloo")
for strategy, dtype, tied in (
    (ShardingStrategy.NO_SHARD, torch.bfloat16, True),
    (ShardingStrategy.NO_SHARD, torch.bfloat16, False),
    (ShardingStrategy.NO_SHARD, torch.float32, True),
    (ShardingStrategy.FULL_SHARD, torch.bfloat16, True),
):
    model = FullyShardedDataParallel(
        Layers(tied=tied),
        sharding_strategy=strategy,
        mixed_precision=MixedPrecision(param_dtype=dtype),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    try:
        with model.no_sync():
            model(torch.ones(1, 1)).backward()
        model(torch.ones(1, 1)).backward()
        outcome = "trained, as expected"
    except RuntimeError as error:
        outcome = f"RuntimeError: {str(error).partition('.')[0]}"
    print(f"{strategy.name}, {dtype}, tied: {tied}: {outcome}", flush=True)
dist.destroy_process_group()
