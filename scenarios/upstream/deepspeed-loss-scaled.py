"""DeepSpeed at stage 0 divides by the number of micro-batches despite scale_wrt_gas=False.

Run: DS_ACCELERATOR=cpu DS_BUILD_OPS=0 torchrun --nproc-per-node 1 deepspeed-loss-scaled.py
"""

import deepspeed
import torch
import torch.distributed as dist


class ReturnsLoss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        return (self.weight * x).sum()


dist.init_process_group("gloo")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # avoids a compilation
for stage in (0, 1):
    model = ReturnsLoss()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
        },
        dist_init_required=False,
    )
    for x in (1.0, 10.0):
        loss = engine(torch.full((1,), x))
        engine.backward(loss, scale_wrt_gas=False)
        engine.step()
    print(f"stage {stage}: weight {model.weight.item()}, expected {1.0 - 11.0}")
dist.destroy_process_group()
