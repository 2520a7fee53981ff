"""Values that follow from the settings of a case: replicas, overlap, each rank's micro-batches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from zero_sim.scenario.spec import OptionSpec, RunSpec, Scenario, SystemSpec, TopologySpec


def overlaps_grads(system: SystemSpec) -> bool:
    """Whether gradients are reduced under backward; of its own accord wherever buckets are cut."""
    return _has_buckets(system) if system.overlap_grads is None else system.overlap_grads


def overlaps_params(system: SystemSpec) -> bool:
    """Whether params are gathered under forward; of its own accord with buckets.

    Only where all params are gathered after a step, stages 1 and 2, and not in chunks.
    """
    if system.overlap_params is None:
        in_chunks = system.gather_chunk_elems is not None
        return _has_buckets(system) and system.stage in (1, 2) and not in_chunks
    return system.overlap_params


def _has_buckets(system: SystemSpec) -> bool:
    # With one bucket a buffer there is next to nothing to overlap, and hooks only cost time.
    return system.bucket_elems is not None


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


def with_options(scenario: Scenario, said: Mapping[str, str]) -> Scenario:
    """The case with some options in the place of what it says of them.

    Args:
        scenario: Any case.
        said: Values as text, by name.
    """
    options = {option.name: option.value for option in scenario.system.options} | dict(said)
    specs = tuple(OptionSpec(name=name, value=value) for name, value in sorted(options.items()))
    return replace(scenario, system=replace(scenario.system, options=specs))
