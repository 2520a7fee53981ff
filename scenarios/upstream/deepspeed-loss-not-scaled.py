"""DeepSpeed at stage 0 in fp16 divides gradients by a loss scale not applied to the loss.

Run: DS_ACCELERATOR=cpu DS_BUILD_OPS=0 torchrun --nproc-per-node 1 deepspeed-loss-not-scaled.py
"""

import deepspeed
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # avoids a compilation
# Without fp16 kernels of oneDNN, a CPU computes in fp16 as well.
deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
for stage in (0, 1):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
            "fp16": {"enabled": True, "loss_scale": 16.0},
        },
        dist_init_required=False,
    )
    engine.backward(engine(torch.ones(1, 1, dtype=torch.float16)).sum())
    engine.step()
    print(f"stage {stage}: weight {model.weight.item()}, expected -1.0")
dist.destroy_process_group()
