"""Repair of a changed case: dependent settings follow the change."""

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
    """Replace a field's value.

    Args:
        scenario: Case to change.
        path: Dotted path of the field.
        value: New value.
    """
    table, _, name = path.rpartition(".")
    if not table:
        return replace(scenario, **{name: value})
    return changed(scenario, table, replace(attrgetter(table)(scenario), **{name: value}))


def repaired(scenario: Scenario) -> Scenario:
    """Fit a case to its number of ranks and steps, and remove unused settings."""
    topology = scenario.topology
    counts = (topology.tp, topology.pp, topology.cp, topology.ep, scenario.system.redundancy)
    # Divisions below would fail. `check_scenario` refuses such a case.
    if min(counts) < 1:
        return scenario
    scenario = _repair_world(scenario)
    size, steps = scenario.world.size, scenario.run.steps
    after = scenario.reload
    if after is not None:
        after = _repair_reload(scenario, after) if steps > 1 else None
        # A reload needs a step before and a step after it. Ranks must exist in both worlds.
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
    faults = tuple(replace(each, rank=min(each.rank, size - 1)) for each in scenario.faults)
    data = replace(scenario.data, nan=nan)
    scenario = _repair_joins(replace(scenario, data=data, reload=after, faults=faults))
    if scenario.model.one_rank:
        # After world and steps, because rank and micro-batch depend on both.
        scenario = fitted_one_rank(scenario)
    return without_unused(scenario)


def _repair_joins(scenario: Scenario) -> Scenario:
    """Limit `own_micro_batches` to the ranks. At least one rank must have all micro-batches."""
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
        # tp, pp and cp do not divide the smaller world, so drop them. ep is fitted below.
        topology = TopologySpec(ep=topology.ep)
    parts = topology.tp * topology.pp
    ranks = size // parts
    topology = replace(
        topology,
        ep=_repair_ep(scenario.model, ranks, wanted=topology.ep),
        shared=topology.shared if topology.tp > 1 else (),
        tied=topology.tied if topology.pp > 1 else (),
    )
    # redundancy must divide the number of ranks that hold the same experts.
    redundancy = largest_divisor(ranks // topology.ep, system.redundancy)
    system = replace(system, redundancy=redundancy)
    return replace(scenario, topology=topology, system=system)


def _repair_reload(scenario: Scenario, after: ReloadSpec) -> ReloadSpec:
    topology = scenario.topology
    size = after.world_size or scenario.world.size
    if size % (topology.tp * topology.pp * topology.cp):
        # A reload does not change tp, pp and cp, so they must divide the new world.
        size = scenario.world.size
    ranks = size // (topology.tp * topology.pp)
    ep = _repair_ep(scenario.model, ranks, wanted=after.ep or topology.ep)
    redundancy = largest_divisor(ranks // ep, after.redundancy or scenario.system.redundancy)
    system, steps = scenario.system, scenario.run.steps
    # At least one step must follow the checkpoint.
    step = min(after.step, steps - 1)
    return replace(
        after,
        step=step,
        lost_micro_batches=min(after.lost_micro_batches, scenario.run.micro_batches),
        async_steps=min(after.async_steps, steps - step),
        world_size=None if after.world_size is None else size,
        ep=ep if after.ep is not None or ep != topology.ep else None,
        redundancy=redundancy
        # None means unchanged. Write a value only if it was given or must differ.
        if after.redundancy is not None or redundancy != system.redundancy
        else None,
    )


def _repair_ep(model: ModelSpec, ranks: int, *, wanted: int) -> int:
    return largest_divisor(math.gcd(ranks, model.experts), wanted) if model.name == "moe" else 1


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor up to a limit, but at least 1.

    Args:
        number: At least 1.
        most: Largest allowed divisor.
    """
    return max((n for n in range(1, min(number, most) + 1) if number % n == 0), default=1)


def with_model(
    scenario: Scenario, model: ModelSpec, *, heirs: Mapping[str, str] | None = None
) -> Scenario:
    """Replace a case's model. Settings of a param move to its heir, or are removed without one.

    Args:
        scenario: Case to change.
        model: New model. Its settings of single params are overwritten.
        heirs: New param by old param; default: by position.
    """
    before = [name for name, _ in params_of(scenario.model)]
    if heirs is None:
        now = [name for name, _ in params_of(model)]
        # Not strict: if the new model has fewer params, the last old params have no heir.
        heirs = dict(zip(before, now, strict=False))
        if scenario.model.nested:
            own = zip(bare_names(scenario.model), bare_names(model), strict=False)
            heirs |= dict(own)
    regrouped = [
        replace(group, match=endings[0])
        for group in scenario.optimizer.groups
        if (endings := _renamed((group.match,), before, heirs))
    ]
    # Remove groups that no longer match, or that an earlier group hides.
    groups = matching_groups(regrouped, list(heirs.values()))
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
    """Return the settings of tied, unused, skipped and one-rank params, for their heirs."""
    # Only bare params have these settings.
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
    """Replace each record's param by its heir; drop records without an heir."""
    return tuple(replace(each, param=heirs[each.param]) for each in records if each.param in heirs)


def _renamed(
    endings: Sequence[str], before: Sequence[str], heirs: Mapping[str, str]
) -> tuple[str, ...]:
    """Keep each ending that still matches an heir. Replace others by the first heir's name."""
    found: dict[str, None] = {}
    for ending in endings:
        named = [heirs[name] for name in before if name.endswith(ending) and name in heirs]
        if named:
            still = any(name.endswith(ending) for name in named)
            found[ending if still else named[0]] = None
    return tuple(found)
