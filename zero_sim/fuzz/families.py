"""Families of cases: the same model, data and optimizer on several systems, which must agree.

The first case is drawn like any other. Its siblings have another stage, partition, buckets, timing
or schedule, but the same inputs of the reference. So the reference's steps are computed once. All
members are checked against the same bits, and therefore against each other.

[Note: size of a family]
A family takes an effort of about `EFFORT_OF_A_FAMILY`, so an expensive case has few siblings.
Expensive cases are as frequent among families as among single cases. If more members are requested,
the limit rises in proportion, for cheap and expensive cases alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

from zero_sim.fuzz.choices import Choices, Rejected, Seeded
from zero_sim.fuzz.effort import chunk_within, effort_of
from zero_sim.fuzz.plans import param_specs
from zero_sim.fuzz.strategies import fitted_to_model
from zero_sim.fuzz.swarm import Swarm
from zero_sim.fuzz.systems import drawn_system, drawn_world, with_drawn_options
from zero_sim.reference import POSITION_FREE, computed_of_system
from zero_sim.scenario.fitting import without_unused
from zero_sim.scenario.names import with_known_names
from zero_sim.scenario.rules import check_scenario
from zero_sim.scenario.spec import Scenario
from zero_sim.targets import Target, capabilities_of, refusals
from zero_sim.workloads import params_of

EFFORT_OF_A_FAMILY, EFFORT_OF_A_MEMBER = 2_400, 150
"""Effort limits in units of `fuzz.effort`: fixed, and per requested member (a cheap case). The
larger limit applies.
"""
# Redraw a sibling if its effort exceeds the first case's by this factor.
_REDRAW_FAMILY_FACTOR = 1.5
# Draws per requested sibling. Most draws fit and are new.
_TRIES = 4


def siblings(
    first: Scenario,
    *,
    target: Target,
    most: int,
    seed: str,
    then: Callable[[Scenario], Scenario] = lambda scenario: scenario,
) -> Iterator[Scenario]:
    """Yield distinct siblings of a case.

    Args:
        first: First case of the family.
        target: Target of the cases.
        most: Maximum number of members, including the first case.
        seed: Determines the siblings.
        then: Function to apply to each drawn sibling.
    """
    sizes = [spec.numel for spec in param_specs(first.model, ep=first.topology.ep)]
    # At least 1, because `room` is divided by it.
    effort_max = max(1, effort_of(first, sizes=sizes))
    room = max(EFFORT_OF_A_FAMILY, EFFORT_OF_A_MEMBER * most)
    wanted = min(most, room // effort_max) - 1
    met, random = {first}, Random(seed)
    for _ in range(_TRIES * max(0, wanted)):
        # `met` also contains the first case.
        if len(met) > wanted:
            return
        try:
            other = then(_drawn_sibling(Seeded(random), first, sizes=sizes, target=target))
        except Rejected:
            continue
        is_new = (
            other not in met and effort_of(other, sizes=sizes) <= _REDRAW_FAMILY_FACTOR * effort_max
        )
        if is_new and not check_scenario(other) and not refusals(target, other):
            met.add(other)
            yield other


def has_family(scenario: Scenario) -> bool:
    """Return True if a case can share its reference with siblings."""
    # The case needs a single world, and an order that does not depend on layout positions.
    return (
        scenario.reload is None
        and scenario.pair is None
        and scenario.world.order_known
        and scenario.world.order in POSITION_FREE
        and not scenario.expect.one_device
    )


def _drawn_sibling(
    choices: Choices, first: Scenario, *, sizes: list[int], target: Target
) -> Scenario:
    own, topology = first.system, first.topology
    ranks = first.world.size // (topology.tp * topology.pp)
    # No theme, because siblings should differ in any way.
    swarm = Swarm(choices, able=capabilities_of(target))
    system = drawn_system(
        choices,
        ranks=ranks // topology.ep,
        sizes=sizes,
        align_elems=choices.integer(2, 8) if swarm.on("aligned") else 1,
        swarm=swarm,
    )
    world = drawn_world(choices, size=first.world.size, swarm=swarm)
    other = replace(
        first,
        system=replace(
            system,
            target=own.target,
            # The reference uses these settings, so they stay the same.
            **computed_of_system(own),
        ),
        # The summation order decides the reference's bits, so it stays the same.
        world=replace(world, order=first.world.order, order_known=first.world.order_known),
    )
    other = fitted_to_model(other, swarm=swarm)
    chunk = chunk_within(other, sizes=sizes)
    other = replace(other, system=replace(other.system, gather_chunk_elems=chunk))
    names = [name for name, _ in params_of(first.model)]
    other = without_unused(with_known_names(other, names))
    return with_drawn_options(choices, other, target=target)
