"""The arena of whole gradients in closed form: as long as what is in memory at a time."""

from __future__ import annotations

from collections.abc import Sequence

from zero_sim.cost.forms import ParamSize, by_registration
from zero_sim.scenario.derived import overlaps_grads
from zero_sim.scenario.spec import Scenario

PLACE_BYTES = 512
"""What is in an arena begins at a multiple of it."""


def keeps_grads(scenario: Scenario) -> bool:
    """Whether whole gradients are accumulated until the last micro-batch."""
    return scenario.system.sync == "last" and scenario.run.micro_batches > 1


def arena_bytes(sizes: Sequence[ParamSize], *, scenario: Scenario, rank: int) -> int:
    """Return the length of the arena of one rank; 0 without one.

    Args:
        sizes: The params that the rank trains, in registration order.
        scenario: The case as its dp-cp group sees it.
        rank: Rank in that group.
    """
    if not scenario.system.arena:
        return 0
    # Buckets of experts are in a part to themselves, whose numbers can differ from rank to rank.
    kinds: dict[str, list[int]] = {}
    for form in by_registration(sizes, scenario=scenario, rank=rank):
        place = -(-form.elems * form.grad_bytes // PLACE_BYTES) * PLACE_BYTES
        kinds.setdefault(form.kind, []).append(place)
    if keeps_grads(scenario):
        return sum(map(sum, kinds.values()))
    length = 2 if overlaps_grads(scenario.system) else 1
    return sum(
        max(sum(places[i : i + length]) for i in range(len(places))) for places in kinds.values()
    )
