"""Devices for cases: presence, reproducible bits, and seeds.

torch must know a device's name: `cpu`, `cuda`, `cuda:1`, or the name that a vendor's package
registers when torch is imported.

[Note: the same bits]
A GPU kernel may add in the order in which its blocks end, and libraries may choose a kernel by
timing. So each case on a device runs with these settings, which are restored afterwards:

- torch's deterministic algorithms, which raise if an operation has none;
- a cuBLAS workspace of fixed size, without which cuBLAS guarantees nothing for several streams;
- fp32 products in fp32, not TF32; 16-bit sums without intermediate rounding;
- cuDNN's deterministic algorithms, chosen without timing.

Only the workspace's environment variable stays, because cuBLAS reads it once.

[Note: the device that is there]
Look up torch's accelerator only once, because in a script with simulated GPUs, torch reports an
accelerator without generator and streams.
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
"""Workspaces (KiB:count) with which cuBLAS is deterministic. The first is the default."""

_MIB = 1 << 20
# torch's name for plain fp32, in contrast to TF32.
_IEEE = "ieee"


def check_device(name: str) -> torch.device:
    """Return the device with this name. Raise EnvironmentProblem if it cannot be used here."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        known = ", ".join(_present())
        raise EnvironmentProblem(
            f"expected a device that torch {torch.__version__} knows, such as {known} here, got "
            f"{name!r}. Try --device cpu, or install the device's package."
        ) from error
    if device.type == "cpu":
        return device
    # torch also knows names of devices that no installed package provides.
    if device.type not in _present():
        what = "a GPU" if device.type == "cuda" else f"a device {device.type!r}"
        raise EnvironmentProblem(
            f"expected {what} that torch {torch.__version__} can use, got none. "
            "Try --device cpu, or `zero-sim doctor`."
        )
    count = torch.get_device_module(device).device_count()
    if device.index is not None and device.index >= count:
        raise EnvironmentProblem(
            f"expected a device from {device.type}:0 to {device.type}:{count - 1}, got "
            f"{name!r}. Try --device {device.type}."
        )
    return device


def _present() -> list[str]:
    accelerator = _accelerator()
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


# Cached, see [Note: the device that is there].
@functools.cache
def _accelerator() -> torch.device | None:
    return current_accelerator(check_available=True)


@contextmanager
def computing_on(name: str, *, rank_threads: int) -> Iterator[Sequence[str]]:
    """Make a device give the same bits each time; see [Note: the same bits].

    Yield descriptions of the settings, none for the CPU. At most `rank_threads` threads of this
    process may compute on the device.

    Raises:
        EnvironmentProblem: The device is absent, the environment contradicts the settings, or the
            device has too little memory for the ranks' workspaces.
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
    """Describe a device and its model; empty for the CPU and for an absent device."""
    try:
        device = check_device(name)
    except EnvironmentProblem:
        return ""
    return "" if device.type == "cpu" else _named(device)


def use_in_thread(name: str) -> None:
    """Select a device in a new thread, because each thread has its own current device."""
    device = torch.device(name)
    if device.type != "cpu" and device.index is not None:
        torch.accelerator.set_device_index(device.index)


def _named(device: torch.device) -> str:
    module = torch.get_device_module(device)
    version = f", CUDA {torch.version.cuda}" if device.type == "cuda" else ""
    return f"{device} ({module.get_device_name(device)}{version})"


def _settle(restored: ExitStack) -> None:
    """Set everything that affects bits, and register its restoration."""
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
    # In the case, an operation without deterministic algorithm must raise, not warn.
    mere_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    restored.callback(
        torch.use_deterministic_algorithms,
        torch.are_deterministic_algorithms_enabled(),
        warn_only=mere_warning,
    )
    torch.use_deterministic_algorithms(True)


def _settle_workspaces(device: torch.device, *, rank_threads: int) -> Iterator[str]:
    """Fix the size of cuBLAS's workspaces, before a thread creates the first workspace."""
    chosen = os.environ.setdefault(WORKSPACE, WORKSPACES[0])
    free_bytes, _ = torch.cuda.mem_get_info(device)
    yield workspaces_in_words(chosen, rank_threads=rank_threads, free_bytes=free_bytes)


def workspaces_in_words(chosen: str, *, rank_threads: int, free_bytes: int) -> str:
    """Describe the memory for cuBLAS's workspaces, one per thread.

    `chosen` is the value of `CUBLAS_WORKSPACE_CONFIG`.

    Raises:
        EnvironmentProblem: cuBLAS is not deterministic with this value, or the memory is too small.
    """
    if chosen not in WORKSPACES:
        raise EnvironmentProblem(
            f"expected {WORKSPACE} to be {' or '.join(WORKSPACES)}, with which cuBLAS gives the "
            f"same bits each time, got {chosen!r}. Unset it."
        )
    # ":4096:8" is 8 buffers of 4096 KiB.
    kib, count = map(int, chosen.strip(":").split(":"))
    whole = rank_threads * kib * count * 1024
    given = (
        f"{rank_threads} rank threads with a cuBLAS workspace of {kib * count / 1024:g} MiB each "
        f"({WORKSPACE}={chosen}): {whole / _MIB:,.0f} MiB of {free_bytes / _MIB:,.0f} MiB free"
    )
    if whole > free_bytes:
        # The second workspace is smaller, and cuBLAS is deterministic with it too.
        smaller = "fewer ranks" if chosen == WORKSPACES[1] else f"{WORKSPACE}={WORKSPACES[1]}"
        raise EnvironmentProblem(
            f"expected ranks that fit on the device, got {given}. Try {smaller}."
        )
    return given


def seed_device(device: torch.device, seed: int) -> None:
    """Seed the current device's generator, but not the CPU's."""
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def random_state() -> Tensor | None:
    """Return the current device's random state; None if no device is in use."""
    module = _module_in_use()
    return None if module is None else module.get_rng_state()


def set_random_state(state: Tensor | None) -> None:
    """Restore a state returned by `random_state`."""
    if state is not None:
        _module_in_use().set_rng_state(state)


def seeded_state(seed: int) -> Tensor | None:
    """Return the device's random state after seeding; None if no device is in use."""
    if _module_in_use() is None:
        return None
    accelerator = _accelerator()
    return torch.Generator(accelerator).manual_seed(seed).get_state()


def has_accelerator() -> bool:
    """Return True if this process can compute on a device other than the CPU."""
    return _accelerator() is not None


def _module_in_use() -> Any:
    """Return torch's module for the accelerator; None if the accelerator is not in use."""
    # Reading its state would start an unused accelerator.
    accelerator = _accelerator()
    if accelerator is None:
        return None
    module = torch.get_device_module(accelerator)
    return module if module.is_initialized() else None
