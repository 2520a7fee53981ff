"""DeepSpeed cannot convert a stage 3 checkpoint saved before the first step.

Run: DS_ACCELERATOR=cpu DS_BUILD_OPS=0 torchrun --nproc-per-node 1 deepspeed-universal-no-step.py
"""

import subprocess
import sys
import tempfile

import deepspeed
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # avoids a compilation
for stage in (1, 3):
    model = torch.nn.Linear(1, 1, bias=False)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": stage},
        },
        dist_init_required=False,
    )
    folder = tempfile.mkdtemp()
    engine.save_checkpoint(folder, tag="saved")
    convert = ["--input_folder", f"{folder}/saved", "--output_folder", f"{folder}/universal"]
    convert.append("--inject_missing_state")
    ran = subprocess.run(
        [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *convert],
        check=False,
        capture_output=True,
        text=True,
    )
    outcome = ran.stderr.strip().splitlines()[-1] if ran.returncode else "converted, as expected"
    print(f"stage {stage}: {outcome}")
dist.destroy_process_group()
