"""DeepSpeed's ZeRO optimizer cannot be built if a param group has no elements.

Run: DS_ACCELERATOR=cpu DS_BUILD_OPS=0 torchrun --nproc-per-node 1 deepspeed-empty-group.py
"""

import deepspeed
import torch
import torch.distributed as dist


class WithEmpty(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.empty = torch.nn.Parameter(torch.ones(0))
        self.weight = torch.nn.Parameter(torch.ones(1))


dist.init_process_group("gloo")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # avoids a compilation
model = WithEmpty()
groups = [{"params": [model.empty]}, {"params": [model.weight]}]
try:
    deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(groups),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 1},
        },
        dist_init_required=False,
    )
    print("built, as expected")
except IndexError as error:
    print(f"IndexError: {error}")
dist.destroy_process_group()
