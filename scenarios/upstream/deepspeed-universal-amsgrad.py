"""DeepSpeed's universal checkpoints contain exp_avg and exp_avg_sq, and silently drop other state.

Run: DS_ACCELERATOR=cpu DS_BUILD_OPS=0 torchrun --nproc-per-node 1 deepspeed-universal-amsgrad.py
"""

import subprocess
import sys
import tempfile

import deepspeed
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # avoids a compilation


def build():
    model = torch.nn.Linear(1, 1, bias=False)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), amsgrad=True),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 1},
            "checkpoint": {"load_universal": True},
        },
        dist_init_required=False,
    )
    return engine


def step(engine):
    engine.backward(engine(torch.ones(1, 1)).sum())
    engine.step()


engine = build()
step(engine)
folder = tempfile.mkdtemp()
engine.save_checkpoint(folder, tag="saved")
convert = ["--input_folder", f"{folder}/saved", "--output_folder", f"{folder}/universal"]
convert.append("--inject_missing_state")
subprocess.run(
    [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *convert],
    check=True,
    capture_output=True,
)
wanted = [sorted(state) for state in engine.basic_optimizer.state.values()]
engine = build()
engine.load_checkpoint(folder, tag="universal")
got = [sorted(state) for state in engine.basic_optimizer.state.values()]
print(f"expected state {wanted}")
print(f"got state {got}")
try:
    step(engine)
except KeyError as error:
    print(f"and in the next step KeyError: {error}")
dist.destroy_process_group()
