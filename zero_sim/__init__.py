"""Prove sharded data-parallel training right, bit for bit, on a simulated cluster in one process.

Importing this package is fast and does not import torch. Each name below is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zero_sim import errors
    from zero_sim.rules.judging import run_case
    from zero_sim.scenario.load import load_scenario
    from zero_sim.scenario.spec import Scenario
    from zero_sim.script.script_checkpoints import checkpoint_here
    from zero_sim.sim import World

__version__ = "0.2.0"

__all__ = ["Scenario", "World", "checkpoint_here", "errors", "load_scenario", "run_case"]

_HOMES = {
    "Scenario": "zero_sim.scenario.spec",
    "World": "zero_sim.sim",
    "checkpoint_here": "zero_sim.script.script_checkpoints",
    "load_scenario": "zero_sim.scenario.load",
    "run_case": "zero_sim.rules.judging",
}


def __getattr__(name: str) -> object:
    if name == "errors":
        return importlib.import_module("zero_sim.errors")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Module-level __getattr__ (PEP 562) loads a name at its first use.
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
