"""A device that cases compute on: there or not, the same bits each time, drawing from seeds.

The name is any that torch knows: `cpu`, `cuda`, `cuda:1`, or that of a vendor's package, which
tells torch of its device when torch is imported.

[Note: the same bits]
On a GPU a kernel may add in the order in which its blocks happen to end, and which kernel computes
a product may be found out by trying. So around every case on a device: torch's deterministic
algorithms, which refuse what has none; a cuBLAS workspace of a fixed size, without which cuBLAS
promises nothing where there are several streams; fp32 products in fp32, not in TF32; 16-bit sums
that are not rounded on their way; cuDNN's deterministic algorithms, chosen without trying.
Afterwards all is as it was, but for the variable of the environment, which cuBLAS reads once.

[Note: the device that is there]
torch is asked for its accelerator once. Where a script runs with GPUs that are the CPU, torch tells
it of one, which has no generator and no streams to wait for.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.accelerator import current_accelerator

from zero_sim.errors import EnvironmentProblem

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACES = (":4096:8", ":16:8")
"""Sizes in KiB and counts with which cuBLAS gives the same bits each time; the first is taken."""

_MIB = 1 << 20
_IEEE = "ieee"


def check_device(name: str) -> torch.device:
    """The device of a name.

    Raises:
        EnvironmentProblem: This process cannot compute on it.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        known = ", ".join(_present())
        raise EnvironmentProblem(
            f"expected a device that torch {torch.__version__} knows, got {name!r}; it "
            f"has {known} here. Try --device cpu, or install the package that brings the device."
        ) from error
    if device.type == "cpu":
        return device
    if device.type not in _present():
        what = "a GPU" if device.type == "cuda" else f"a device {device.type!r}"
        raise EnvironmentProblem(
            f"expected {what} that torch {torch.__version__} can use, got none. "
            "Try --device cpu, or `zero-sim doctor`."
        )
    count = torch.get_device_module(device).device_count()
    if device.index is not None and device.index >= count:
        raise EnvironmentProblem(
            f"expected one of the devices {device.type}:0 to {device.type}:{count - 1}, got "
            f"{name!r}. Try --device {device.type}."
        )
    return device


def _present() -> list[str]:
    accelerator = _accelerator()
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


@functools.cache
def _accelerator() -> torch.device | None:
    return current_accelerator(check_available=True)


@contextmanager
def computing_on(name: str, *, rank_threads: int) -> Iterator[Sequence[str]]:
    """Let a device give the same bits each time; see [Note: the same bits].

    Args:
        name: The device.
        rank_threads: Threads of this process that compute on it, at most.

    Yields:
        What was settled, in words; nothing for the CPU.

    Raises:
        EnvironmentProblem: It is not there, the environment asks for something else, or so many
            ranks do not fit on it.
    """
    device = check_device(name)
    if device.type == "cpu":
        yield ()
        return
    notes = [
        f"computed on {_named(device)}: deterministic algorithms, no TF32, no sums of reduced "
        "precision, cuDNN without benchmark"
    ]
    if device.type == "cuda":
        notes += _settle_workspaces(device, rank_threads=rank_threads)
    with ExitStack() as restored:
        _settle(restored)
        if device.index is not None:
            before = torch.accelerator.current_device_index()
            torch.accelerator.set_device_index(device.index)
            restored.callback(torch.accelerator.set_device_index, before)
        yield notes


def device_in_words(name: str) -> str:
    """A device with its kind; empty for the CPU, and for one that is not here."""
    try:
        device = check_device(name)
    except EnvironmentProblem:
        return ""
    return "" if device.type == "cpu" else _named(device)


def use_in_thread(name: str) -> None:
    """Let a new thread compute on the device of a name: the current device is a thread's own."""
    device = torch.device(name)
    if device.type != "cpu" and device.index is not None:
        torch.accelerator.set_device_index(device.index)


def _named(device: torch.device) -> str:
    module = torch.get_device_module(device)
    version = f", CUDA {torch.version.cuda}" if device.type == "cuda" else ""
    return f"{device} ({module.get_device_name(device)}{version})"


def _settle(restored: ExitStack) -> None:
    """Set what decides bits, and leave to a stack to restore it."""
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    for place, name, value in (
        (matmul, "fp32_precision", _IEEE),
        (cudnn.conv, "fp32_precision", _IEEE),
        (cudnn.rnn, "fp32_precision", _IEEE),
        (matmul, "allow_fp16_reduced_precision_reduction", False),
        (matmul, "allow_bf16_reduced_precision_reduction", False),
        (matmul, "allow_fp16_accumulation", False),
        (cudnn, "benchmark", False),
        (cudnn, "deterministic", True),
    ):
        restored.callback(setattr, place, name, getattr(place, name))
        setattr(place, name, value)
    mere_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    restored.callback(
        torch.use_deterministic_algorithms,
        torch.are_deterministic_algorithms_enabled(),
        warn_only=mere_warning,
    )
    torch.use_deterministic_algorithms(True)


def _settle_workspaces(device: torch.device, *, rank_threads: int) -> Iterator[str]:
    """Fix the size of cuBLAS' workspaces, before a thread asks for the first one."""
    chosen = os.environ.setdefault(WORKSPACE, WORKSPACES[0])
    free_bytes, _ = torch.cuda.mem_get_info(device)
    yield workspaces_in_words(chosen, rank_threads=rank_threads, free_bytes=free_bytes)


def workspaces_in_words(chosen: str, *, rank_threads: int, free_bytes: int) -> str:
    """What cuBLAS' workspaces come to, one for each thread.

    Args:
        chosen: The value of `CUBLAS_WORKSPACE_CONFIG`.
        rank_threads: How many threads there are.
        free_bytes: Memory that the device has left.

    Raises:
        EnvironmentProblem: cuBLAS is not deterministic with that value, or they do not fit.
    """
    if chosen not in WORKSPACES:
        raise EnvironmentProblem(
            f"expected {WORKSPACE} to be {' or '.join(WORKSPACES)}, with which cuBLAS gives the "
            f"same bits each time, got {chosen!r}. Try to leave it unset."
        )
    kib, count = map(int, chosen.strip(":").split(":"))
    whole = rank_threads * kib * count * 1024
    told = (
        f"{rank_threads} rank threads with a cuBLAS workspace of {kib * count / 1024:g} MiB each "
        f"({WORKSPACE}={chosen}): {whole / _MIB:,.0f} MiB of {free_bytes / _MIB:,.0f} MiB free"
    )
    if whole > free_bytes:
        smaller = "fewer ranks" if chosen == WORKSPACES[1] else f"{WORKSPACE}={WORKSPACES[1]}"
        raise EnvironmentProblem(
            f"expected ranks that fit on the device, got {told}. Try {smaller}."
        )
    return told


def seed_device(device: torch.device, seed: int) -> None:
    """Seed the generator of a device, the current one of its kind; the CPU's is left alone."""
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def random_state() -> Tensor | None:
    """The state of the current device's generator; None where no device has been used."""
    module = _module_in_use()
    return None if module is None else module.get_rng_state()


def set_random_state(state: Tensor | None) -> None:
    """Put a state in place that `random_state` told."""
    if state is not None:
        _module_in_use().set_rng_state(state)


def seeded_state(seed: int) -> Tensor | None:
    """The state that the current device's generator has after being seeded; None as above."""
    if _module_in_use() is None:
        return None
    accelerator = _accelerator()
    return torch.Generator(accelerator).manual_seed(seed).get_state()


def has_accelerator() -> bool:
    """True if this process can compute on something else than the CPU."""
    return _accelerator() is not None


def _module_in_use() -> Any:
    """What torch has for its accelerator; to look at a GPU that nobody uses would start it."""
    accelerator = _accelerator()
    if accelerator is None:
        return None
    module = torch.get_device_module(accelerator)
    return module if module.is_initialized() else None
