"""The part of a case that its reference computes from: two that agree in it owe the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from zero_sim.scenario.spec import Scenario, SystemSpec, WorldSpec

_OF_SYSTEM = ("divide", "divide_by", "sync", "redundancy", "grad_dtype", "offload_state")


def computed_from(scenario: Scenario) -> Scenario:
    """The case with everything left out that the reference does not read.

    It knows no buckets, shards or calls, nor who runs when: of the system it reads what is summed
    and divided, how often and in which dtype, and of the world how many ranks add in which order.

    Args:
        scenario: As a reference is given it, with an order that does not depend on positions.
    """
    world = scenario.world
    return replace(
        scenario,
        name="",
        description="",
        system=SystemSpec(**computed_of_system(scenario.system)),
        world=WorldSpec(size=world.size, order=world.order, order_known=world.order_known),
    )


def computed_of_system(system: SystemSpec) -> dict[str, Any]:
    """Return the settings of a system that the reference reads, by field."""
    return {name: getattr(system, name) for name in _OF_SYSTEM}
