"""Diagnosis of this machine: parts that it can run, and why it cannot run the others."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterator, Mapping

import zero_sim
from zero_sim.report.records import Fact

TORCH_LEAST = (2, 11)
"""Oldest torch that zero_sim is tested with."""
NCCL_SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
NCCL_SHARING_LEAST = (2, 30)
"""Oldest NCCL in which ranks can share a GPU."""

_SIM_PARTS = ("zero_sim.sim", "zero_sim.run.runner")


def examine() -> tuple[Fact, ...]:
    """Examine the interpreter, torch and optional parts; imports torch.

    Returns:
        Facts in display order. The machine can run scenarios if each required fact is ok.
    """
    facts = [
        Fact(name="zero_sim", value=zero_sim.__version__, ok=True),
        Fact(name="python", value=platform.python_version(), ok=True),
        Fact(name="platform", value=platform.platform(), ok=True),
    ]
    facts.extend(_torch_facts())
    can_run = all(fact.ok for fact in facts if fact.required)
    # Importing the simulator needs a working torch.
    if can_run:
        facts.extend(_sim_facts())
        can_run = all(fact.ok for fact in facts if fact.required)
    facts.append(
        Fact(
            name="run: backend sim",
            value="yes" if can_run else "no",
            ok=can_run,
            note="any number of ranks in this process, on the CPU; no GPU is used"
            if can_run
            else "see the lines marked NO",
            required=True,
        )
    )
    facts.append(_digits_fact(can_run=can_run))
    if can_run:
        facts.extend(_real_facts())
    return tuple(facts)


def _torch_facts() -> Iterator[Fact]:
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        note = f"import torch failed ({error}); install the CPU build of torch"
        yield Fact(name="torch", value="missing", ok=False, note=note, required=True)
        return
    version = str(torch.__version__)
    new_enough = _version(version) >= TORCH_LEAST
    least = ".".join(map(str, TORCH_LEAST))
    yield Fact(
        name="torch",
        value=version,
        ok=new_enough,
        note="" if new_enough else f"expected {least} or newer; upgrade torch",
        required=True,
    )
    yield Fact(
        name="cpu kernels",
        value=str(torch.backends.cpu.get_cpu_capability()),
        ok=True,
        note="bits of matrix products may differ between machines, never within one",
    )
    threads = f"{torch.get_num_threads()} of torch, {_usable_cpus()} usable"
    yield Fact(name="cpu threads", value=threads, ok=True, note="ranks compute with one each")
    available = bool(torch.distributed.is_available())
    yield Fact(
        name="torch.distributed",
        value="available" if available else "not built in",
        ok=available,
        note="" if available else "this torch was built with USE_DISTRIBUTED=0; install another",
        required=True,
    )


def _sim_facts() -> Iterator[Fact]:
    for module in _SIM_PARTS:
        try:
            importlib.import_module(module)
        # Any error, because a broken installation is a problem to report like all others.
        except Exception as error:  # noqa: BLE001
            note = f"import {module} failed: {type(error).__name__}: {error}"
            yield Fact(name="sim backend", value="broken", ok=False, note=note, required=True)
            return
    yield Fact(name="sim backend", value="ready", ok=True, required=True)


def _real_facts() -> Iterator[Fact]:
    """Return facts about real processes and GPUs."""
    torch = importlib.import_module("torch")
    dist = importlib.import_module("torch.distributed")
    gloo = bool(dist.is_gloo_available())
    note = "own workers, or torchrun" if gloo else "this torch was built without gloo"
    yield Fact(name="run: backend gloo", value="yes" if gloo else "no", ok=gloo, note=note)
    count = torch.cuda.device_count()
    names = sorted({torch.cuda.get_device_name(index) for index in range(count)})
    note = ", ".join(names) if count else "no GPU that this torch can use"
    yield Fact(name="gpus", value=str(count), ok=count > 0, note=note)
    note = "" if count else "needs a GPU, and a torch built with CUDA"
    yield Fact(name="run: device cuda", value="yes" if count else "no", ok=count > 0, note=note)
    # Without NCCL, importing its version fails.
    nccl = _nccl_version() if dist.is_nccl_available() else ()
    version = ".".join(map(str, nccl))
    note = "" if nccl else "this torch was built without NCCL"
    yield Fact(name="nccl", value=version or "none", ok=bool(nccl), note=note)
    able = bool(nccl) and count > 0
    note = f"under torchrun, up to {count} ranks here" if able else "needs NCCL and a GPU"
    yield Fact(name="run: backend nccl", value="yes" if able else "no", ok=able, note=note)
    yield shared_gpu_fact(nccl=nccl, gpu_count=count, environment=os.environ)


def shared_gpu_fact(
    *, nccl: tuple[int, ...], gpu_count: int, environment: Mapping[str, str]
) -> Fact:
    """Return a fact: can several NCCL ranks share one GPU?

    Args:
        nccl: NCCL version; empty without NCCL.
        gpu_count: GPUs of this machine.
        environment: Variables of this process.
    """
    least = ".".join(map(str, NCCL_SHARING_LEAST))
    if gpu_count == 0:
        note = "needs a GPU"
    elif nccl[:2] < NCCL_SHARING_LEAST:
        have = ".".join(map(str, nccl)) or "none"
        note = f"needs NCCL {least} or newer, have {have}; pip has newer ones as nvidia-nccl-cu13"
    elif environment.get(NCCL_SHARING) != "1":
        note = f"set {NCCL_SHARING}=1"
    else:
        note = "experimental in NCCL"
    can = note == "experimental in NCCL"
    return Fact(
        name="run: several nccl ranks a GPU", value="yes" if can else "no", ok=can, note=note
    )


def _nccl_version() -> tuple[int, ...]:
    try:
        return tuple(importlib.import_module("torch.cuda.nccl").version())
    # A build without CUDA has this module but not the functions it calls.
    except (ImportError, AttributeError, RuntimeError):
        return ()


def _digits_fact(*, can_run: bool) -> Fact:
    found = importlib.util.find_spec("sklearn") is not None
    if not found:
        note = 'needs scikit-learn; pip install "zero-sim[digits]"'
        return Fact(name="run: model digits", value="no", ok=False, note=note)
    version = importlib.metadata.version("scikit-learn")
    note = f"scikit-learn {version}" if can_run else "see the lines marked NO"
    return Fact(name="run: model digits", value="yes" if can_run else "no", ok=can_run, note=note)


def _usable_cpus() -> int:
    # Containers limit the CPUs of a process below those of the machine.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _version(text: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for part in text.split("+")[0].split(".")[:2]:
        # Only digits: "2.13.0a0" is 2.13.
        digits = "".join(char for char in part if char.isdigit())
        numbers.append(int(digits or 0))
    return tuple(numbers)
