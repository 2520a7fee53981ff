"""Scenarios: the records of a case, and the files they are written in.

This module re-exports the records alone, so that the system, the simulator and the reference can
read a scenario without importing what parses one; see `load`, `discover` and `schema` for that.
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
