"""Textbook ZeRO in three layers: `Buffer`, `DistributedDataParallel`, `DistributedOptimizer`.

To learn ZeRO, read the modules in this order:

    naive              the whole idea on a single screen
    config, sharding   the settings; the stages as a table
    states, unit       the life of a bucket's gradients and params
    storage            a unit's memory
    schedule, gathers  when gradients are reduced and params are gathered
    hooks              hooks on modules and autograd, for the schedules
    buffer             units in flat memory
    buffered_module    a module's buffers
    groups             the ranks that share each kind of params
    data_parallel      a step, micro-batch by micro-batch
    masters            fp32 values of this rank's fragments
    optimizer          optimizer state, and the step
    norm, division, collectives

`zero_sim.layout` plans the layouts. `refusals` checks modules and optimizers. `variants` contains
replacements for the parts listed in `seams`.
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
