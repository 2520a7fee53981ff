"""DeepSpeed cannot load a universal checkpoint on a rank without part of a param group.

Run: DS_ACCELERATOR=cpu DS_BUILD_OPS=0 torchrun --nproc-per-node 2 deepspeed-universal-no-part.py
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
        optimizer=torch.optim.AdamW(model.parameters()),
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
folders = [tempfile.mkdtemp()]
dist.broadcast_object_list(folders)
folder = folders[0]
engine.save_checkpoint(folder, tag="saved")
dist.barrier()
if dist.get_rank() == 0:
    convert = ["--input_folder", f"{folder}/saved", "--output_folder", f"{folder}/universal"]
    convert.append("--inject_missing_state")
    subprocess.run(
        [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *convert],
        check=True,
        capture_output=True,
    )
dist.barrier()
engine = build()
try:
    engine.load_checkpoint(folder, tag="universal")
    print("loaded, as expected")
except IndexError as error:
    print(f"rank {dist.get_rank()}: IndexError: {error}")
except RuntimeError:
    print(f"rank {dist.get_rank()} waits for it")
