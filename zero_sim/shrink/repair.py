"""Repair of a changed case: settings that depend on the changed one follow it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from zero_sim.scenario.bare_params import bare_names, fitted_one_rank
from zero_sim.scenario.derived import limits_of_joins
from zero_sim.scenario.fitting import without_unused
from zero_sim.scenario.names import matching_groups
from zero_sim.scenario.spec import (
    FreezeSpec,
    ModelSpec,
    OneRankSpec,
    ReloadSpec,
    Scenario,
    SkipSpec,
    TopologySpec,
)
from zero_sim.workloads import params_of


def changed(scenario: Scenario, path: str, value: Any) -> Scenario:
    """Replace the value of one field.

    Args:
        scenario: Case to change.
        path: Dotted path of the field.
        value: The new value.
    """
    table, _, name = path.rpartition(".")
    if not table:
        return replace(scenario, **{name: value})
    return changed(scenario, table, replace(attrgetter(table)(scenario), **{name: value}))


def repaired(scenario: Scenario) -> Scenario:
    """Fit a case to its number of ranks and steps, and remove unused settings.

    A case with counts out of range is returned unchanged, for the rules to refuse.
    """
    topology = scenario.topology
    counts = (topology.tp, topology.pp, topology.cp, topology.ep, scenario.system.redundancy)
    # Divisors below would fail.
    if min(counts) < 1:
        return scenario
    scenario = _repair_world(scenario)
    size, steps = scenario.world.size, scenario.run.steps
    after = scenario.reload
    if after is not None:
        after = _repair_reload(scenario, after) if steps > 1 else None
        # A reload lies between two steps.
        size = min(size, after.world_size or size) if after is not None else size
    nan = scenario.data.nan
    if nan is not None:
        micro_batch = min(nan.micro_batch, scenario.run.micro_batches - 1)
        nan = replace(
            nan,
            rank=min(nan.rank, size - 1),
            step=min(nan.step, steps - 1),
            # Not below 0, even if the number of micro-batches is out of range.
            micro_batch=max(0, micro_batch),
        )
    # `size` is the smaller world of a reload, so these ranks exist in both.
    faults = tuple(replace(each, rank=min(each.rank, size - 1)) for each in scenario.faults)
    data = replace(scenario.data, nan=nan)
    scenario = _repair_joins(replace(scenario, data=data, reload=after, faults=faults))
    if scenario.model.one_rank:
        # After the world and the steps, because its rank and micro-batch depend on both.
        scenario = fitted_one_rank(scenario)
    return without_unused(scenario)


def _repair_joins(scenario: Scenario) -> Scenario:
    """Limit the entries to the ranks; at least one rank has data for every micro-batch."""
    run, (fewest, least) = scenario.run, limits_of_joins(scenario)
    own = tuple(min(max(n, least), run.micro_batches) for n in run.own_micro_batches[:fewest])
    if own and max(own) < run.micro_batches:
        own = (*own[:-1], run.micro_batches)
    if set(own) <= {run.micro_batches}:
        # All ranks have all micro-batches, which is the default.
        own = ()
    return replace(scenario, run=replace(run, own_micro_batches=own))


def _repair_world(scenario: Scenario) -> Scenario:
    topology, system, size = scenario.topology, scenario.system, scenario.world.size
    if size % (topology.tp * topology.pp * topology.cp):
        # A smaller world that tp, pp and cp do not divide loses them; experts are fitted below.
        topology = TopologySpec(ep=topology.ep)
    parts = topology.tp * topology.pp
    ranks = size // parts
    topology = replace(
        topology,
        ep=_repair_ep(scenario.model, ranks, wanted=topology.ep),
        shared=topology.shared if topology.tp > 1 else (),
        tied=topology.tied if topology.pp > 1 else (),
    )
    # Replicas must divide the ranks that hold the same experts.
    redundancy = largest_divisor(ranks // topology.ep, system.redundancy)
    system = replace(system, redundancy=redundancy)
    return replace(scenario, topology=topology, system=system)


def _repair_reload(scenario: Scenario, after: ReloadSpec) -> ReloadSpec:
    topology = scenario.topology
    size = after.world_size or scenario.world.size
    if size % (topology.tp * topology.pp * topology.cp):
        # tp, pp and cp stay across a reload, so a world that they do not divide is not possible.
        size = scenario.world.size
    ranks = size // (topology.tp * topology.pp)
    ep = _repair_ep(scenario.model, ranks, wanted=after.ep or topology.ep)
    redundancy = largest_divisor(ranks // ep, after.redundancy or scenario.system.redundancy)
    system, steps = scenario.system, scenario.run.steps
    # At least one step follows the checkpoint.
    step = min(after.step, steps - 1)
    return replace(
        after,
        step=step,
        lost_micro_batches=min(after.lost_micro_batches, scenario.run.micro_batches),
        async_steps=min(after.async_steps, steps - step),
        world_size=None if after.world_size is None else size,
        ep=ep if after.ep is not None or ep != topology.ep else None,
        redundancy=redundancy
        # None means unchanged: write a value only if it was given or must differ.
        if after.redundancy is not None or redundancy != system.redundancy
        else None,
    )


def _repair_ep(model: ModelSpec, ranks: int, *, wanted: int) -> int:
    return largest_divisor(math.gcd(ranks, model.experts), wanted) if model.name == "moe" else 1


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of a number that is at most `most`; at least 1.

    Args:
        number: At least 1.
        most: Upper limit of the divisor.
    """
    return max((n for n in range(1, min(number, most) + 1) if number % n == 0), default=1)


def with_model(
    scenario: Scenario, model: ModelSpec, *, heirs: Mapping[str, str] | None = None
) -> Scenario:
    """Replace the model of a case; settings that name a param name its heir, or are removed.

    Args:
        scenario: Case to change.
        model: The new model; its settings of single params are replaced.
        heirs: New param for each old one; by default, by position.
    """
    before = [name for name, _ in params_of(scenario.model)]
    if heirs is None:
        now = [name for name, _ in params_of(model)]
        # Not strict: if the new model has fewer params, the last old ones have no heir.
        heirs = dict(zip(before, now, strict=False))
        if scenario.model.nested:
            own = zip(bare_names(scenario.model), bare_names(model), strict=False)
            heirs |= dict(own)
    regrouped = [
        replace(group, match=endings[0])
        for group in scenario.optimizer.groups
        if (endings := _renamed((group.match,), before, heirs))
    ]
    groups = matching_groups(regrouped, list(heirs.values()))
    # Remove groups that match nothing any more, or that an earlier group hides.
    topology = replace(
        scenario.topology,
        shared=_renamed(scenario.topology.shared, before, heirs),
        tied=_renamed(scenario.topology.tied, before, heirs),
    )
    return repaired(
        replace(
            scenario,
            model=replace(
                model,
                freeze=_of_heirs(scenario.model.freeze, heirs),
                **_readers(scenario.model, model, heirs),
            ),
            optimizer=replace(scenario.optimizer, groups=groups),
            topology=topology,
        )
    )


def _readers(before: ModelSpec, after: ModelSpec, heirs: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of tied, unused and one-rank params, by the names of their heirs."""
    # Only bare params can be tied, unused or read by one rank.
    if after.name != "params":
        return {"tied": (), "unused": (), "skip": (), "one_rank": ()}
    return {
        "tied_first": before.tied_first,
        "tied": tuple(heirs[name] for name in before.tied if name in heirs),
        "unused": tuple(heirs[name] for name in before.unused if name in heirs),
        "skip": _of_heirs(before.skip, heirs),
        "one_rank": _of_heirs(before.one_rank, heirs),
    }


def _of_heirs(
    records: Sequence[FreezeSpec | SkipSpec | OneRankSpec], heirs: Mapping[str, str]
) -> tuple[Any, ...]:
    """Replace the param of each record by its heir; drop records without one."""
    return tuple(replace(each, param=heirs[each.param]) for each in records if each.param in heirs)


def _renamed(
    endings: Sequence[str], before: Sequence[str], heirs: Mapping[str, str]
) -> tuple[str, ...]:
    """Keep each ending that still matches an heir; otherwise use the name of the first heir."""
    found: dict[str, None] = {}
    for ending in endings:
        named = [heirs[name] for name in before if name.endswith(ending) and name in heirs]
        if named:
            still = any(name.endswith(ending) for name in named)
            found[ending if still else named[0]] = None
    return tuple(found)
