"""Settings that determine a case's reference. Cases with equal settings share its results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from zero_sim.scenario.spec import Scenario, SystemSpec, WorldSpec

# Division, accumulation and dtype. Buckets, shards and schedule have no effect.
_OF_SYSTEM = ("divide", "divide_by", "sync", "redundancy", "grad_dtype", "offload_state")


def computed_from(scenario: Scenario) -> Scenario:
    """Return the case with defaults for all settings that the reference does not read.

    Args:
        scenario: The case, with a summation order that does not depend on positions.
    """
    world = scenario.world
    # Schedule and timing change no bit in the reference.
    return replace(
        scenario,
        name="",
        description="",
        system=SystemSpec(**computed_of_system(scenario.system)),
        world=WorldSpec(size=world.size, order=world.order, order_known=world.order_known),
    )


def computed_of_system(system: SystemSpec) -> dict[str, Any]:
    """Return the system settings that the reference reads, by field."""
    return {name: getattr(system, name) for name in _OF_SYSTEM}
