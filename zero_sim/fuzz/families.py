"""Families of cases: a model, data and optimizer, and many systems that owe the same for them.

The first case of a family is drawn as any other. Its siblings have another stage, partition,
buckets, timing or schedule, and keep all that the reference computes from, so that its steps are
taken once and all of them are held to the same bits: to each other's as well.

[Note: how many there are]
A family takes about as much effort as `EFFORT_OF_A_FAMILY` says, so that one that is dear has few
members: most cases are cheap ones, and what is dear is as frequent among families as among cases
that have none. Who asks for more members than that has room for gets them of cheap cases, and of
dear ones as many more.
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
"""Of all members together, in the units of `fuzz.effort`: so much, or so much for each that is
asked for, which is what the cheapest take."""
_DEARER = 1.5
"""A sibling that takes so many times as much effort as the first one is drawn anew."""
_TRIES = 4
"""Draws for each sibling that is wanted: most of what is drawn fits the model, and is new."""


def siblings(
    first: Scenario,
    *,
    target: Target,
    most: int,
    seed: str,
    then: Callable[[Scenario], Scenario] = lambda scenario: scenario,
) -> Iterator[Scenario]:
    """Other cases of the family of a case, each once.

    Args:
        first: The case, as it was drawn.
        target: What it is for.
        most: Most members, the first one included.
        seed: What they follow from.
        then: What becomes of each that is drawn.
    """
    sizes = [spec.numel for spec in param_specs(first.model, ep=first.topology.ep)]
    effort_max = max(1, effort_of(first, sizes=sizes))
    room = max(EFFORT_OF_A_FAMILY, EFFORT_OF_A_MEMBER * most)
    wanted = min(most, room // effort_max) - 1
    met, random = {first}, Random(seed)
    for _ in range(_TRIES * max(0, wanted)):
        if len(met) > wanted:
            return
        try:
            other = then(_drawn_sibling(Seeded(random), first, sizes=sizes, target=target))
        except Rejected:
            continue
        is_new = other not in met and effort_of(other, sizes=sizes) <= _DEARER * effort_max
        if is_new and not check_scenario(other) and not refusals(target, other):
            met.add(other)
            yield other


def has_family(scenario: Scenario) -> bool:
    """Whether the reference of a case can judge others: one of one world, in a plain order."""
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
            **computed_of_system(own),
        ),
        world=replace(world, order=first.world.order, order_known=first.world.order_known),
    )
    other = fitted_to_model(other, swarm=swarm)
    chunk = chunk_within(other, sizes=sizes)
    other = replace(other, system=replace(other.system, gather_chunk_elems=chunk))
    names = [name for name, _ in params_of(first.model)]
    other = without_unused(with_known_names(other, names))
    return with_drawn_options(choices, other, target=target)
