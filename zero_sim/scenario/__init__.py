"""Scenarios: records of a case, and files that contain them.

This module exports the records only, so that the system, the simulator and the reference import no
parser. For parsing, see `load`, `discover` and `schema`.
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
