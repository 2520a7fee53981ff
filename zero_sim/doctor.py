"""What this machine can run, and why it cannot run the rest."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterator

import zero_sim
from zero_sim.report.records import Fact

TORCH_LEAST = (2, 11)
"""The oldest torch that zero_sim is tested with."""

_SIM_PARTS = ("zero_sim.sim", "zero_sim.verify.runner")


def examine() -> tuple[Fact, ...]:
    """Look at the interpreter, torch and the optional parts; imports torch.

    Returns:
        Facts in the order in which they are shown; the machine can run scenarios when every
        required one is ok.
    """
    facts = [
        Fact(name="zero_sim", value=zero_sim.__version__, ok=True),
        Fact(name="python", value=platform.python_version(), ok=True),
        Fact(name="platform", value=platform.platform(), ok=True),
    ]
    facts.extend(_torch_facts())
    can_run = all(fact.ok for fact in facts if fact.required)
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
        # Whatever it is, it is reported like everything else that is amiss.
        except Exception as error:  # noqa: BLE001
            note = f"import {module} failed: {type(error).__name__}: {error}"
            yield Fact(name="sim backend", value="broken", ok=False, note=note, required=True)
            return
    yield Fact(name="sim backend", value="ready", ok=True, required=True)


def _digits_fact(*, can_run: bool) -> Fact:
    found = importlib.util.find_spec("sklearn") is not None
    if not found:
        note = 'needs scikit-learn; pip install "zero-sim[digits]"'
        return Fact(name="run: model digits", value="no", ok=False, note=note)
    version = importlib.metadata.version("scikit-learn")
    note = f"scikit-learn {version}" if can_run else "see the lines marked NO"
    return Fact(name="run: model digits", value="yes" if can_run else "no", ok=can_run, note=note)


def _usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _version(text: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for part in text.split("+")[0].split(".")[:2]:
        digits = "".join(char for char in part if char.isdigit())
        numbers.append(int(digits or 0))
    return tuple(numbers)
