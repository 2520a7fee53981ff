"""DeepSpeed at stages 1 and 2 drops the settings of param groups of torch.optim.Adagrad.

Run: DS_ACCELERATOR=cpu DS_BUILD_OPS=0 torchrun --nproc-per-node 1 deepspeed-adagrad.py
"""

import deepspeed
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # avoids a compilation
for stage in (0, 1):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    groups = [{"params": list(model.parameters()), "lr": 0.5}]
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.Adagrad(groups, lr=0.001),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
        },
        dist_init_required=False,
    )
    engine.backward(engine(torch.ones(1, 1)).sum())
    engine.step()
    print(f"stage {stage}: weight {model.weight.item():.4f}, expected 0.5000")
dist.destroy_process_group()
