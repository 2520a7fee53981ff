"""Seams: the parts of an engine that can be exchanged for another one's."""

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
    """The part at each seam; the defaults are the textbook's.

    Example:
        DistributedDataParallel(module, config=config, group=group, seams=Seams(unit=OtherUnit))
    """

    cast: type[PlainCast] = PlainCast
    """How masters become working params."""
    unit: Callable[..., Unit] = Unit
    """Builds a unit, which issues the collectives over its gradients and params."""
    step_count: type[StepCount] = StepCount
    """What gradients are divided by."""
    grads: Callable[[Wrapped], GradSchedule] = schedule_grads
    """When units are reduced."""
    params: Callable[..., ParamSchedule] = schedule_params
    """When params are gathered; arguments as `schedule_params`."""


TEXTBOOK = Seams()
