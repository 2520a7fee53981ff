"""Cases fitted to what they use: after a checkpoint, and without settings that change nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from zero_sim.scenario.applies import APPLIES, Applies
from zero_sim.scenario.bare_params import with_others
from zero_sim.scenario.fields import default_at
from zero_sim.scenario.spec import ReloadSpec, Scenario

RELOADED = {
    "world_size": "world.size",
    "ep": "topology.ep",
    **{
        name: f"system.{name}"
        for name in (
            "stage",
            "redundancy",
            "bucket_elems",
            "partition",
            "param_order",
            "reduce_buffer_elems",
        )
    },
}
"""Fields of `reload` that replace others, and the paths of these."""


def after_reload(scenario: Scenario) -> Scenario:
    """The case as it goes on after its checkpoint; as it is where it has none.

    Args:
        scenario: The case, before the checkpoint.
    """
    after = with_reloaded(scenario)
    return after if after.system is scenario.system else fitted_to_stage(after)


def with_reloaded(scenario: Scenario) -> Scenario:
    """Return the case with the fields that its reload replaces, and all others as they are.

    Args:
        scenario: The case, before the checkpoint.
    """
    changed: dict[str, dict[str, object]] = {}
    for name, path in reloaded(scenario.reload).items():
        table, _, field = path.partition(".")
        changed.setdefault(table, {})[field] = getattr(scenario.reload, name)
    tables = {
        table: replace(getattr(scenario, table), **fields) for table, fields in changed.items()
    }
    return replace(scenario, **tables)


def reloaded(reload: ReloadSpec | None) -> dict[str, str]:
    """Fields of a reload that are set, and the paths of those that they replace."""
    return {n: path for n, path in RELOADED.items() if getattr(reload, n, None) is not None}


def fitted_to_stage(scenario: Scenario) -> Scenario:
    """The case with those settings of its system at their defaults that its stage has no use for.

    A reload has to change the others itself.
    """
    for row in APPLIES:
        is_within = all(path.startswith("system.") for path in (row.path, *row.needs))
        if is_within and not row.holds_after and row.broken(scenario):
            scenario = _without(row.path, scenario)
    return scenario


def has_no_use(row: Applies, scenario: Scenario) -> bool:
    """True if a setting is set and has no meaning, nor one after the checkpoint if that is enough.

    Args:
        row: The setting.
        scenario: A case, whatever else is wrong in it.
    """
    if not row.broken(scenario):
        return False
    return row.after != "unused" or bool(row.unmet(after_reload(scenario)))


def without_unused(scenario: Scenario) -> Scenario:
    """The case without settings that change nothing in it.

    Args:
        scenario: A case, whatever else is wrong in it.
    """
    for row in APPLIES:
        if row.after == "unused" and has_no_use(row, scenario):
            scenario = _without(row.path, scenario)
    if not orders_axes(scenario):
        scenario = _without("topology.order", scenario)
    if scenario.model.one_rank:
        scenario = with_others(scenario)
    for name in ("freeze", "skip"):
        spans = getattr(scenario.model, name)
        kept = tuple(each for each in spans if each.start < scenario.run.steps)
        if kept != spans:
            changed: dict[str, Any] = {name: kept}
            scenario = replace(scenario, model=replace(scenario.model, **changed))
    return scenario


def _without(path: str, scenario: Scenario) -> Scenario:
    table, _, name = path.partition(".")
    record = replace(getattr(scenario, table), **{name: default_at(path)})
    return replace(scenario, **{table: record})


def orders_axes(scenario: Scenario) -> bool:
    """True if ranks differ in two axes, before the checkpoint or after it."""

    def axes(case: Scenario) -> int:
        sizes = (case.topology.tp, case.topology.cp, case.topology.pp)
        others = math.prod(max(1, size) for size in sizes)
        return sum(size > 1 for size in (*sizes, case.world.size // others))

    return max(axes(scenario), axes(after_reload(scenario))) > 1
