"""Seams: the engine's replaceable parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zero_sim.zero.gathers import ParamSchedule, schedule_params
from zero_sim.zero.model import PlainCast
from zero_sim.zero.schedule import GradSchedule, Wrapped, schedule_grads
from zero_sim.zero.step_count import StepCount
from zero_sim.zero.unit import Unit


@dataclass(frozen=True, kw_only=True, slots=True)
class Seams:
    """The engine's replaceable parts; by default the textbook's.

    Example:
        DistributedDataParallel(module, config=config, group=group, seams=Seams(unit=OtherUnit))
    """

    # Factories rather than instances, because each needs the module, its units or its groups.
    cast: type[PlainCast] = PlainCast
    """Conversion from masters to working params."""
    unit: Callable[..., Unit] = Unit
    """Factory of units, which issue all collectives over gradients and params."""
    step_count: type[StepCount] = StepCount
    """Count that becomes the gradient divisor."""
    grads: Callable[[Wrapped], GradSchedule] = schedule_grads
    """Factory of the gradient schedule, which reduces units."""
    params: Callable[..., ParamSchedule] = schedule_params
    """Factory of the param schedule, which gathers units; arguments as `schedule_params`."""


TEXTBOOK = Seams()
