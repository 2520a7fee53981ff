"""DeepSpeed in fp16 divides gradients by the next step's loss scale if the scale grows.

Run: DS_ACCELERATOR=cpu DS_BUILD_OPS=0 torchrun --nproc-per-node 1 deepspeed-scale-growth.py
"""

import deepspeed
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # avoids a compilation
# Without fp16 kernels of oneDNN, a CPU computes in fp16 as well.
deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
for stage in (1, 2, 3):
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
            "fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2},
        },
        dist_init_required=False,
    )
    for step in range(4):
        scale = engine.optimizer.loss_scale
        engine.backward(engine(torch.ones(1, 1, dtype=torch.float16)).sum())
        engine.step()
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            got = model.weight.item()
        print(f"stage {stage}: scale {scale:g}, weight {got}, expected {-1.0 - step}")
dist.destroy_process_group()
