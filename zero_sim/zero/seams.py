"""Seams: the replaceable parts of an engine."""

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
    """The part at each seam; by default the textbook's.

    Example:
        DistributedDataParallel(module, config=config, group=group, seams=Seams(unit=OtherUnit))
    """

    # Factories rather than instances, because each needs the module, its units or its groups.
    cast: type[PlainCast] = PlainCast
    """Conversion from masters to working params."""
    unit: Callable[..., Unit] = Unit
    """Factory of units, which issue the collectives over their gradients and params."""
    step_count: type[StepCount] = StepCount
    """Divisor of the gradients."""
    grads: Callable[[Wrapped], GradSchedule] = schedule_grads
    """Factory of the schedule that reduces units."""
    params: Callable[..., ParamSchedule] = schedule_params
    """Factory of the schedule that gathers params; arguments as `schedule_params`."""


TEXTBOOK = Seams()
