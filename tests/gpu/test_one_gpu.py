"""One GPU: the simulated world, NCCL with one rank, and ranks that share the GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zero_sim import run_case
from zero_sim.doctor import NCCL_SHARING, NCCL_SHARING_LEAST
from zero_sim.scenario.spec import ModelSpec, OptimizerSpec, Scenario, SystemSpec, WorldSpec

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("order", ["linear", "gloo", "nccl-ring"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_simulated_world_passes_on_gpu(device, order, dtype):
    scenario = Scenario(
        schema=1,
        name="gpu",
        model=ModelSpec(name="mlp", dtype=dtype, hidden=16),
        world=WorldSpec(size=4, order=order),
        system=SystemSpec(bucket_elems=300),
        optimizer=OptimizerSpec(clip_norm=1.0),
    )
    result = run_case(scenario, device=device)
    assert (result.verdict, result.findings, result.error) == ("pass", (), "")


def run_on_nccl(folder, *, size, environment):
    text = f'schema = 1\n[model]\nname = "ternary"\n[world]\nsize = {size}\norder = "nccl-ring"\n'
    folder.joinpath("case.toml").write_text(text)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size)]
    return subprocess.run(
        [*launcher, "-m", "zero_sim", "run", str(folder), "--backend", "nccl"],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_nccl_passes_with_one_rank(gpu, tmp_path):
    done = run_on_nccl(tmp_path, size=1, environment={})
    assert done.returncode == 0, done.stdout + done.stderr


def test_nccl_passes_with_ranks_sharing_a_gpu(gpu, tmp_path):
    version = torch.cuda.nccl.version()
    if version[:2] < NCCL_SHARING_LEAST:
        pytest.skip(f"needs NCCL {NCCL_SHARING_LEAST} or newer, have {version}")
    done = run_on_nccl(tmp_path, size=2, environment={NCCL_SHARING: "1"})
    assert done.returncode == 0, done.stdout + done.stderr
