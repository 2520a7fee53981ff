"""Values derived from a case's settings: overlap, a rank's micro-batches, group ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from zero_sim.scenario.spec import OptionSpec, RunSpec, Scenario, SystemSpec, TopologySpec


def overlaps_grads(system: SystemSpec) -> bool:
    """Return True if gradients are reduced during backward; by default if there are buckets."""
    return _has_buckets(system) if system.overlap_grads is None else system.overlap_grads


def overlaps_params(system: SystemSpec) -> bool:
    """Return True if params are gathered during forward; by default if there are buckets."""
    if system.overlap_params is None:
        # Stage 0 gathers no params, and stage 3 gathers them when they are used. Chunks use the
        # same memory in turn, so a forward cannot overlap them.
        in_chunks = system.gather_chunk_elems is not None
        return _has_buckets(system) and system.stage in (1, 2) and not in_chunks
    return system.overlap_params


def _has_buckets(system: SystemSpec) -> bool:
    # With one bucket per buffer, there is almost nothing to overlap, and hooks only cost time.
    return system.bucket_elems is not None


def own_micro_batches(run: RunSpec, *, step: int, rank: int) -> int:
    """Return how many micro-batches a group rank has data for; it joins the rest."""
    # Counts shift by one rank each step, so that every rank joins at some time.
    counts = run.own_micro_batches
    return counts[(rank + step) % len(counts)] if counts else run.micro_batches


def world_size_at(scenario: Scenario, *, step: int) -> int:
    """Return the world size in a step, before or after the checkpoint, if any."""
    reload = scenario.reload
    # reload.step is the first step after the checkpoint.
    if reload is None or reload.world_size is None or step < reload.step:
        return scenario.world.size
    return reload.world_size


def group_rank_of(rank: int, *, topology: TopologySpec, world_size: int) -> int:
    """Return a world rank's group rank: how many lower ranks its dp-cp group has."""
    sizes = {"tp": topology.tp, "cp": topology.cp, "pp": topology.pp}
    sizes["dp"] = world_size // math.prod(sizes.values())
    place, stride = 0, 1
    # The rank's mixed-radix digits, fastest axis first; cp and dp make up the group rank.
    for axis in topology.order.split("-"):
        rank, index = divmod(rank, sizes[axis])
        if axis in ("cp", "dp"):
            place, stride = place + index * stride, stride * sizes[axis]
    return place


def counts_over_ranks(scenario: Scenario) -> bool:
    """Return True if ranks must exchange counts to know the gradients' divisor."""
    by = scenario.system.divide_by
    # Rows may always differ between ranks; micro-batches differ only with the field.
    return by == "tokens" or (by == "micro-batches" and bool(scenario.run.own_micro_batches))


def limits_of_joins(scenario: Scenario) -> tuple[int, int]:
    """Return the most entries of `run.own_micro_batches`, and the least valid entry."""
    reload, system = scenario.reload, scenario.system
    sizes, stages = [scenario.world.size], [system.stage]
    if reload is not None:
        # Consider both worlds, because the field holds before and after the checkpoint.
        sizes += [reload.world_size or scenario.world.size]
        stages += [system.stage if reload.stage is None else reload.stage]
    # With at most one entry per rank, each entry belongs to some rank in every step.
    fewest = min(sizes) // (scenario.topology.tp * scenario.topology.pp)
    nan = scenario.data.nan
    # At stage 3, a joining rank first needs a micro-batch with data. The NaN needs data, too.
    return fewest, max(int(3 in stages), 0 if nan is None else nan.micro_batch + 1)


def with_options(scenario: Scenario, option_values: Mapping[str, str]) -> Scenario:
    """Return the case with some options replaced; `option_values` has text by name."""
    options = {option.name: option.value for option in scenario.system.options} | dict(
        option_values
    )
    specs = tuple(OptionSpec(name=name, value=value) for name, value in sorted(options.items()))
    return replace(scenario, system=replace(scenario.system, options=specs))
