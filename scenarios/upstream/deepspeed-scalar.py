"""DeepSpeed fails on a param without dimensions.

Run: DS_ACCELERATOR=cpu DS_BUILD_OPS=0 torchrun --nproc-per-node 1 deepspeed-scalar.py
"""

import deepspeed
import torch
import torch.distributed as dist


class WithScalar(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature = torch.nn.Parameter(torch.tensor(1.0))
        self.weight = torch.nn.Parameter(torch.ones(2))


dist.init_process_group("gloo")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # avoids a compilation
model = WithScalar()
try:
    deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 1},
        },
        dist_init_required=False,
    )
    print("built, as expected")
except RuntimeError as error:
    print(f"RuntimeError: {error}")
dist.destroy_process_group()
