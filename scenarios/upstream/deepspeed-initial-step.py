"""DeepSpeed at stage 0 in bf16 or fp16 makes an optimizer step with zero gradients at its start.

Run: DS_ACCELERATOR=cpu DS_BUILD_OPS=0 torchrun --nproc-per-node 1 deepspeed-initial-step.py
"""

import deepspeed
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # avoids a compilation
for stage in (0, 1):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    client = torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.5)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=client,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": True},
        },
        dist_init_required=False,
    )
    (master,) = client.param_groups[0]["params"]
    steps = [state["step"].item() for state in client.state.values()]
    begun = f"{master[0].item():.4f}, steps {steps}"
    engine.backward(engine(torch.ones(1, 1, dtype=torch.bfloat16)).sum())
    engine.step()
    (master,) = client.param_groups[0]["params"]
    steps = [state["step"].item() for state in client.state.values()]
    print(f"stage {stage}: master at the beginning {begun}; expected 1.0000, steps []")
    print(
        f"stage {stage}: after a step {master[0].item():.4f}, steps {steps}; expected 0.2500, [1.0]"
    )
dist.destroy_process_group()
