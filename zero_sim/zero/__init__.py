"""Textbook ZeRO in three layers: `Buffer`, `DistributedDataParallel`, `DistributedOptimizer`.

To learn ZeRO, read its modules in this order:

    naive              the whole idea on one screen
    config, sharding   the settings, and the stages as a table
    states, unit       the life of what one collective moves
    storage            where its memory is
    schedule, gathers  when gradients are reduced, and when params are gathered
    hooks              how a schedule learns what runs
    buffer             units in flat memory
    buffered_module    the buffers of a module
    groups             the ranks that hold each kind of params
    data_parallel      a step, micro-batch by micro-batch
    masters            fp32 values of what a rank owns
    optimizer          their state, and the step
    norm, division, collectives

Layouts are planned before, in `zero_sim.layout`. `refusals` has the checks of modules and
optimizers, and `variants` has other parts for the seams (`seams`).
"""

from __future__ import annotations

from zero_sim.zero.buffer import Buffer
from zero_sim.zero.config import Divide, DivideBy, GradDtype, Stage, Sync, ZeroConfig
from zero_sim.zero.data_parallel import DistributedDataParallel
from zero_sim.zero.groups import (
    KindGroups,
    KindOf,
    build_redundancy_groups,
)
from zero_sim.zero.masters import OwnedFragment
from zero_sim.zero.optimizer import DistributedOptimizer, OptimFactory, StepSeams
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
    "StepSeams",
    "Sync",
    "Unit",
    "ZeroConfig",
    "build_redundancy_groups",
]
