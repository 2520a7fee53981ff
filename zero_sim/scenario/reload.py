"""The case that goes on after a checkpoint, in another world with another layout."""

from __future__ import annotations

import dataclasses

from zero_sim.errors import Problem
from zero_sim.scenario.spec import ReloadSpec, Scenario

_PATHS = {
    "world_size": "world.size",
    "ep": "topology.ep",
    "stage": "system.stage",
    "redundancy": "system.redundancy",
    "bucket_elems": "system.bucket_elems",
    "partition": "system.partition",
    "param_order": "system.param_order",
}
"""What a reload can change: its field, and the path of what it takes the place of."""


def after_reload(scenario: Scenario) -> Scenario:
    """The case as it goes on after its checkpoint; as it is where it has none.

    Args:
        scenario: The case.
    """
    changed: dict[str, dict[str, object]] = {}
    for name in _changed_by(scenario.reload):
        table, _, field = _PATHS[name].partition(".")
        changed.setdefault(table, {})[field] = getattr(scenario.reload, name)
    tables = {
        table: dataclasses.replace(getattr(scenario, table), **fields)
        for table, fields in changed.items()
    }
    return dataclasses.replace(scenario, **tables)


def placed_in_reload(problem: Problem, reload: ReloadSpec) -> Problem:
    """A problem of the case after its checkpoint, at the field of `reload` that brings it.

    Args:
        problem: With the path that it has in a case without a checkpoint.
        reload: What the case changes there.
    """
    for name in _changed_by(reload):
        if _PATHS[name] == problem.path:
            return dataclasses.replace(problem, path=f"reload.{name}")
    return problem


def _changed_by(reload: ReloadSpec | None) -> list[str]:
    return [name for name in _PATHS if getattr(reload, name, None) is not None]
