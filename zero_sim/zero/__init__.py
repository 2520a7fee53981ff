"""Textbook ZeRO in three layers: `Buffer`, `DistributedDataParallel`, `DistributedOptimizer`.

Read them in that order. Where things lie is planned before, in `zero_sim.layout`.
"""

from __future__ import annotations

from zero_sim.zero.buffer import Buffer, ParamMemory
from zero_sim.zero.config import Divide, GradDtype, Stage, ZeroConfig
from zero_sim.zero.data_parallel import DistributedDataParallel
from zero_sim.zero.optimizer import DistributedOptimizer, OptimFactory, OwnedFragment

__all__ = [
    "Buffer",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "Divide",
    "GradDtype",
    "OptimFactory",
    "OwnedFragment",
    "ParamMemory",
    "Stage",
    "ZeroConfig",
]
