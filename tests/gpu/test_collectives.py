"""AVG, PREMUL_SUM, uneven lists and zero splits: NCCL equals the simulation, devices the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.collectives import differences, program
from zero_sim.backends.nccl_settings import PINS
from zero_sim.doctor import NCCL_SHARING, NCCL_SHARING_LEAST
from zero_sim.sim import World

ROOT = Path(__file__).parents[2]


def on_real_ranks(backend, device, *, size, environment=None):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size)]
    return subprocess.run(
        [*launcher, "-m", "tests.gpu.collectives", backend, device],
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("order", ["linear", "nccl-ring", "nccl-sym"])
def test_simulated_collectives_on_device_match_cpu(device, order):
    premul = order == "nccl-ring"
    with World(3, order=order) as world:
        there, here = (
            world.run(lambda rank, place=place: program(rank, device=place, premul=premul))
            for place in (device, "cpu")
        )
    assert [differences(*pair) for pair in zip(there, here, strict=True)] == [[], [], []]


def test_gloo_matches_simulated_collectives():
    """Without a GPU, this runs everything but NCCL."""
    done = on_real_ranks("gloo", "cpu", size=3)
    assert done.returncode == 0, done.stdout + done.stderr


def test_nccl_matches_simulated_collectives(gpu):
    count = torch.cuda.device_count()
    if count > 1:
        done = on_real_ranks("nccl", gpu, size=count, environment=dict(PINS))
    else:
        version = torch.cuda.nccl.version()
        if version[:2] < NCCL_SHARING_LEAST:
            pytest.skip(f"needs several GPUs or NCCL {NCCL_SHARING_LEAST}, have {version}")
        done = on_real_ranks("nccl", gpu, size=3, environment={**PINS, NCCL_SHARING: "1"})
    assert done.returncode == 0, done.stdout + done.stderr
