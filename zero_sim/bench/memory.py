"""Memory figures: overhead beyond the ranks' tensors, and the cost of many ranks."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time

import torch
import torch.distributed as dist

from zero_sim.backends.worlds import WorldPool
from zero_sim.bench.cases import simulated_seconds, small_case
from zero_sim.rules.judging import run_case
from zero_sim.sim import World
from zero_sim.workloads import build_workload


def memory_ratio() -> float:
    """Return a fresh process's peak growth when it trains 4 ranks, over the ranks' tensors."""
    return float(_printed_by("print_memory()"))


def many_ranks(world_size: int) -> tuple[float, float]:
    """Open a world, run it once and close it, and return processor seconds and growth in MB."""
    call = f"print_many_ranks({world_size})"
    # Two processes, because the malloc setting for exact memory figures costs time.
    seconds, _ = _printed_by(call, in_use=False).split()
    _, grown = _printed_by(call).split()
    return float(seconds), float(grown)


def _printed_by(call: str, *, in_use: bool = True) -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"from zero_sim.bench.memory import *; {call}"],
        check=True,
        capture_output=True,
        text=True,
        # Without a fixed threshold, glibc keeps freed tensors in a fragmented heap, so resident
        # memory would exceed the memory in use.
        env={**os.environ, **({"MALLOC_MMAP_THRESHOLD_": "65536"} if in_use else {})},
    )
    return done.stdout


def print_many_ranks(world_size: int) -> None:
    """Print the figures for `many_ranks`; runs in a process of its own."""
    torch.set_num_threads(1)
    # A small world first, so that imports and caches do not count.
    with World(2) as world:
        world.run(_branching)
    before_bytes, began = _resident_bytes(), time.process_time()
    with World(world_size) as world:
        world.run(_branching)
    seconds = time.process_time() - began
    sys.stdout.write(f"{seconds} {(_peak_bytes() - before_bytes) / 1e6}\n")


def _branching(rank: int) -> None:
    # Odd ranks first make another torch call, as in programs with different work on each rank.
    if rank % 2:
        torch.zeros(rank)
    dist.all_reduce(torch.tensor([float(rank)]))


def print_memory() -> None:
    """Print the figure for `memory_ratio`; runs in a process of its own."""
    torch.set_num_threads(1)
    with WorldPool() as pool:
        run_case(small_case(), pool=pool)
    scenario = small_case(hidden=1024, steps=2, rows=2)
    workload = build_workload(scenario)
    module = workload.build()
    numel = sum(param.numel() for param in module.parameters())
    size = scenario.world.size
    # Bytes per element: 8 on each rank for fp32 params and grads, 12 in all shards together for
    # masters and two moments.
    held_bytes = size * 8 * numel + 12 * numel
    del module
    # Measured here, so that neither the small case nor the workload counts.
    before_bytes = _resident_bytes()
    with World(size) as world:
        simulated_seconds(world, scenario, workload)
    sys.stdout.write(f"{(_peak_bytes() - before_bytes) / held_bytes}\n")


def _peak_bytes() -> int:
    # ru_maxrss is in KiB on Linux.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        # The second number is the resident set, in pages.
        return int(statm.read().split()[1]) * resource.getpagesize()
