"""The part of a case that its reference computes from: two that agree in it owe the same."""

from __future__ import annotations

from dataclasses import replace

from zero_sim.scenario.spec import Scenario, SystemSpec, WorldSpec


def computed_from(scenario: Scenario) -> Scenario:
    """The case with everything left out that the reference does not read.

    It knows no buckets, shards or calls, nor who runs when: of the system it reads what is summed
    and divided, how often and in which dtype, and of the world how many ranks add in which order.

    Args:
        scenario: As a reference is given it, with an order that does not depend on positions.
    """
    system, world = scenario.system, scenario.world
    return replace(
        scenario,
        name="",
        description="",
        system=SystemSpec(
            divide=system.divide,
            divide_by=system.divide_by,
            sync=system.sync,
            redundancy=system.redundancy,
            grad_dtype=system.grad_dtype,
            offload_state=system.offload_state,
        ),
        world=WorldSpec(size=world.size, order=world.order, order_known=world.order_known),
    )
