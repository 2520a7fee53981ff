"""Cases fitted to their features: after a checkpoint, and without settings that have no effect."""

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
"""Fields of `reload`, with the paths that they replace."""


def after_reload(scenario: Scenario) -> Scenario:
    """Return the case after its checkpoint; unchanged if it has none."""
    after = with_reloaded(scenario)
    # Settings depend on the stage and other fields in `system`, so only changes there matter.
    return after if after.system is scenario.system else fitted_to_stage(after)


def with_reloaded(scenario: Scenario) -> Scenario:
    """Return the case with only the fields changed that its reload sets."""
    changed: dict[str, dict[str, object]] = {}
    for name, path in reloaded(scenario.reload).items():
        table, _, field = path.partition(".")
        changed.setdefault(table, {})[field] = getattr(scenario.reload, name)
    tables = {
        table: replace(getattr(scenario, table), **fields) for table, fields in changed.items()
    }
    return replace(scenario, **tables)


def reloaded(reload: ReloadSpec | None) -> dict[str, str]:
    """Return the fields that a reload sets, with the paths that they replace."""
    return {n: path for n, path in RELOADED.items() if getattr(reload, n, None) is not None}


def fitted_to_stage(scenario: Scenario) -> Scenario:
    """Reset settings to their defaults if they have no effect at the case's stage.

    Settings that are checked after a checkpoint stay, because the reload itself must change them.
    """
    for row in APPLIES:
        # Callers have changed fields in `system`, so only rows within this table can break.
        is_within = all(path.startswith("system.") for path in (row.path, *row.needs))
        if is_within and not row.holds_after and row.broken(scenario):
            scenario = _without(row.path, scenario)
    return scenario


def has_no_use(row: Applies, scenario: Scenario) -> bool:
    """Return True if a row's setting has no effect in a case, which may be invalid."""
    if not row.broken(scenario):
        return False
    # An `unused` setting without effect before the checkpoint may still have one after it.
    return row.after != "unused" or bool(row.unmet(after_reload(scenario)))


def without_unused(scenario: Scenario) -> Scenario:
    """Return the case, which may be invalid, without settings that have no effect."""
    for row in APPLIES:
        if row.after == "unused" and has_no_use(row, scenario):
            scenario = _without(row.path, scenario)
    # `APPLIES` has no rows for the rest, which depends on how many ranks and steps there are.
    if not orders_axes(scenario):
        scenario = _without("topology.order", scenario)
    if scenario.model.one_rank:
        # An entry that covers every loss has no effect.
        scenario = with_others(scenario)
    for name in ("freeze", "skip"):
        spans = getattr(scenario.model, name)
        # A span that starts after the last step has no effect.
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
    """Return True if two axes have several ranks, before or after the checkpoint."""

    def axes(case: Scenario) -> int:
        sizes = (case.topology.tp, case.topology.cp, case.topology.pp)
        others = math.prod(max(1, size) for size in sizes)
        return sum(size > 1 for size in (*sizes, case.world.size // others))

    return max(axes(scenario), axes(after_reload(scenario))) > 1
