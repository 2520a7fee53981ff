"""Textbook ZeRO in three layers: `Buffer`, `DistributedDataParallel`, `DistributedOptimizer`.

To learn ZeRO, read `sharding` (the stages as a table), `unit` (the life of what one collective
moves), `storage` (where its memory is), `schedule` (when it moves), then `buffer`, `data_parallel`
and `optimizer`, which put them together. Where things lie is planned before, in `zero_sim.layout`.
"""

from __future__ import annotations

from zero_sim.zero.buffer import Buffer
from zero_sim.zero.config import Divide, DivideBy, GradDtype, Stage, Sync, ZeroConfig
from zero_sim.zero.data_parallel import DistributedDataParallel, KindOf
from zero_sim.zero.groups import (
    KindGroups,
    build_expert_groups,
    build_redundancy_groups,
)
from zero_sim.zero.optimizer import DistributedOptimizer, OptimFactory, OwnedFragment
from zero_sim.zero.seams import Seams
from zero_sim.zero.unit import ParamMemory, Unit

__all__ = [
    "Buffer",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "Divide",
    "DivideBy",
    "GradDtype",
    "KindGroups",
    "KindOf",
    "OptimFactory",
    "OwnedFragment",
    "ParamMemory",
    "Seams",
    "Stage",
    "Sync",
    "Unit",
    "ZeroConfig",
    "build_expert_groups",
    "build_redundancy_groups",
]
