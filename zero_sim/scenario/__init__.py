"""Scenarios: the records of a case, and the files that contain them.

This module re-exports only the records. So the system, the simulator and the reference can read a
scenario without importing a parser; see `load`, `discover` and `schema` for parsing.
"""

from __future__ import annotations

from zero_sim.scenario.spec import (
    DataSpec,
    ExpectSpec,
    FaultSpec,
    ModelSpec,
    NanSpec,
    OptimizerSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    WorldSpec,
)

__all__ = [
    "DataSpec",
    "ExpectSpec",
    "FaultSpec",
    "ModelSpec",
    "NanSpec",
    "OptimizerSpec",
    "RunSpec",
    "Scenario",
    "SystemSpec",
    "WorldSpec",
]
