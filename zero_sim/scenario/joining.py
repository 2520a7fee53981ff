"""Micro-batches for which a rank has no data: it joins them with gradients of zero."""

from __future__ import annotations

import math

from zero_sim.scenario.spec import RunSpec, Scenario, TopologySpec


def own_micro_batches(run: RunSpec, *, step: int, rank: int) -> int:
    """For how many micro-batches of a step, the first ones, a rank has data.

    Args:
        run: Of the case.
        step: Counted from 0.
        rank: Rank in its dp-cp group.
    """
    counts = run.own_micro_batches
    return counts[(rank + step) % len(counts)] if counts else run.micro_batches


def world_size_at(scenario: Scenario, *, step: int) -> int:
    """Ranks of the world that takes a step, before the checkpoint or after it.

    Args:
        scenario: A case with a checkpoint, or without one.
        step: Counted from 0.
    """
    reload = scenario.reload
    if reload is None or reload.world_size is None or step < reload.step:
        return scenario.world.size
    return reload.world_size


def place_in_group(rank: int, *, topology: TopologySpec, world_size: int) -> int:
    """A rank's place in its dp-cp group: how many lower ranks train the same params.

    Args:
        rank: Rank in the world.
        topology: Of the case.
        world_size: Ranks of the world, a multiple of tp x cp x pp.
    """
    sizes = {"tp": topology.tp, "cp": topology.cp, "pp": topology.pp}
    sizes["dp"] = world_size // math.prod(sizes.values())
    place, stride = 0, 1
    for axis in topology.order.split("-"):
        rank, index = divmod(rank, sizes[axis])
        if axis in ("cp", "dp"):
            place, stride = place + index * stride, stride * sizes[axis]
    return place


def counts_over_ranks(scenario: Scenario) -> bool:
    """Whether what gradients are divided by is known only once ranks told each other their part."""
    by = scenario.system.divide_by
    return by == "tokens" or (by == "micro-batches" and bool(scenario.run.own_micro_batches))


def limits_of_joins(scenario: Scenario) -> tuple[int, int]:
    """Most entries of `run.own_micro_batches`, and the least that one may be.

    Args:
        scenario: A case that is valid otherwise; of one that reloads, both worlds count.
    """
    reload, system = scenario.reload, scenario.system
    sizes, stages = [scenario.world.size], [system.stage]
    if reload is not None:
        sizes += [reload.world_size or scenario.world.size]
        stages += [system.stage if reload.stage is None else reload.stage]
    fewest = min(sizes) // (scenario.topology.tp * scenario.topology.pp)
    nan = scenario.data.nan
    return fewest, max(int(3 in stages), 0 if nan is None else nan.micro_batch + 1)
