"""Textbook ZeRO in three layers: `Buffer`, `DistributedDataParallel`, `DistributedOptimizer`.

Read them in that order. Where things lie is planned before, in `zero_sim.layout`.
"""

from __future__ import annotations

from zero_sim.zero.buffer import Bucket, Buffer, ParamMemory
from zero_sim.zero.config import Divide, DivideBy, GradDtype, Stage, Sync, ZeroConfig
from zero_sim.zero.data_parallel import DistributedDataParallel, KindOf
from zero_sim.zero.groups import KindGroups, build_expert_groups, build_redundancy_groups
from zero_sim.zero.optimizer import DistributedOptimizer, OptimFactory, OwnedFragment
from zero_sim.zero.overlap import OverlapMeter

__all__ = [
    "Bucket",
    "Buffer",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "Divide",
    "DivideBy",
    "GradDtype",
    "KindGroups",
    "KindOf",
    "OptimFactory",
    "OverlapMeter",
    "OwnedFragment",
    "ParamMemory",
    "Stage",
    "Sync",
    "ZeroConfig",
    "build_expert_groups",
    "build_redundancy_groups",
]
