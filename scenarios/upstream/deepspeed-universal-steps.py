"""DeepSpeed's stage 3 loads one step and one group's settings for all groups of a checkpoint.

Run: DS_ACCELERATOR=cpu DS_BUILD_OPS=0 torchrun --nproc-per-node 1 deepspeed-universal-steps.py
"""

import subprocess
import sys
import tempfile

import deepspeed
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # avoids a compilation


class Sum(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.ones(1))
        self.b = torch.nn.Parameter(torch.ones(1))

    def forward(self):
        return (self.a + self.b).sum()


def build():
    model = Sum()
    groups = [{"params": [model.a], "weight_decay": 0.5}, {"params": [model.b], "lr": 0.25}]
    optimizer = torch.optim.AdamW(groups, lr=0.125, weight_decay=0.0)
    config = {
        "train_batch_size": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 3},
        "checkpoint": {"load_universal": True},
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )
    return engine, optimizer


def step(engine):
    engine.backward(engine())
    engine.step()


def steps_and_settings(optimizer):
    steps = [int(state["step"]) for state in optimizer.state.values()]
    return steps, [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]


folder = tempfile.mkdtemp()
engine, optimizer = build()
step(engine)
engine.save_checkpoint(folder, tag="saved")
convert = ["--input_folder", f"{folder}/saved", "--output_folder", f"{folder}/universal"]
subprocess.run(
    [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *convert],
    check=True,
    capture_output=True,
)
step(engine)
wanted = steps_and_settings(optimizer)
engine, optimizer = build()
engine.load_checkpoint(folder, tag="universal")
step(engine)
got = steps_and_settings(optimizer)
print(f"expected steps of {wanted[0]}, got {got[0]}")
print(f"expected lr and weight decay of {wanted[1]}, got {got[1]}")
dist.destroy_process_group()
