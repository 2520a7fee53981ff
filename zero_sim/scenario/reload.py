"""The case that goes on after a checkpoint, in another world with another layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from zero_sim.errors import Problem
from zero_sim.scenario.buffer_conditions import BUFFER_CONDITIONS
from zero_sim.scenario.conditions import CONDITIONS, Condition
from zero_sim.scenario.fields import default_at, describe_value, show
from zero_sim.scenario.spec import ReloadSpec, Scenario, SystemSpec

_PATHS = {
    "world_size": "world.size",
    "ep": "topology.ep",
    "stage": "system.stage",
    "redundancy": "system.redundancy",
    "bucket_elems": "system.bucket_elems",
    "partition": "system.partition",
    "param_order": "system.param_order",
    "reduce_buffer_elems": "system.reduce_buffer_elems",
}
"""What a reload can change: its field, and the path of what it takes the place of."""

_OF_STAGE_1 = ("redundancy", "partition")
"""What stage 0 has no use for."""


def after_reload(scenario: Scenario) -> Scenario:
    """The case as it goes on after its checkpoint; as it is where it has none.

    Args:
        scenario: The case, before the checkpoint.
    """
    changed: dict[str, dict[str, object]] = {}
    for name in _changed_by(scenario.reload):
        table, _, field = _PATHS[name].partition(".")
        changed.setdefault(table, {})[field] = getattr(scenario.reload, name)
    tables = {
        table: dataclasses.replace(getattr(scenario, table), **fields)
        for table, fields in changed.items()
    }
    system = tables.get("system")
    if system is not None:
        # What only the stage before it had has no meaning any more.
        system = without_sharded_params(system)
        if system.stage not in (1, 2):
            system = dataclasses.replace(
                system, reduce_buffer_elems=None, contiguous_grads=True, gather_chunk_elems=None
            )
        if system.stage < 2 or system.reduce_buffer_elems is not None:
            system = dataclasses.replace(system, arena=False)
        if system.stage == 3:
            system = dataclasses.replace(system, checkpoints="none", offload_checkpoints=False)
        if not system.stage:
            system = dataclasses.replace(system, sum_by="reduce-scatter")
        tables["system"] = system
    return dataclasses.replace(scenario, **tables)


def without_sharded_params(system: SystemSpec) -> SystemSpec:
    """A system without settings of params that are sharded, where its stage shards none.

    Args:
        system: Of any stage.
    """
    if system.stage == 3:
        return system
    return dataclasses.replace(
        system,
        prefetch=None,
        reshard_after_forward=True,
        gather_after_step=False,
    )


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


def check_async_steps(scenario: Scenario) -> Iterator[Problem]:
    """Check that a checkpoint written while training goes on is complete when the run ends.

    Args:
        scenario: The case, before the checkpoint.
    """
    after, steps = scenario.reload, scenario.run.steps
    # A checkpoint behind the run is reported as such.
    if after is None or not 1 <= after.step < steps:
        return
    left = steps - after.step
    if after.async_steps > left:
        yield Problem(
            path="reload.async_steps",
            message=f"expected at most the {left} of run.steps = {steps} that follow "
            f"reload.step = {after.step}, got {describe_value(after.async_steps)}.",
            suggestion=f"Try {left}, or more run.steps.",
        )


def check_after_reload(scenario: Scenario) -> Iterator[Problem]:
    """Check that what goes together before a checkpoint does so after it, too.

    Args:
        scenario: The case, before the checkpoint.
    """
    if scenario.reload is None:
        return
    after = after_reload(scenario)
    for condition in (*CONDITIONS, *BUFFER_CONDITIONS):
        if condition.holds_after and not condition.broken(scenario):
            for problem in condition.check(after):
                placed = placed_in_reload(problem, scenario.reload)
                if placed.path == problem.path:
                    placed = _left_as_it_was(problem, condition, scenario.reload)
                yield _with_what_is_used(placed, after)


def _left_as_it_was(problem: Problem, condition: Condition, reload: ReloadSpec) -> Problem:
    """A problem with a setting that a reload does not name, at the one that it does."""
    made_by = next(
        name
        for name in _changed_by(reload)
        if any(f"{_PATHS[name]}.".startswith(f"{read}.") for read in condition.reads)
    )
    own = next((name for name, path in _PATHS.items() if path == problem.path), None)
    if own is None:
        return dataclasses.replace(problem, path=f"reload.{made_by}")
    return Problem(
        path=f"reload.{made_by}",
        message=f"{problem.message.removesuffix('.')}, as {problem.path} is before.",
        suggestion=f"Write {own} = {show(default_at(problem.path))} beside it, or leave it out.",
    )


def _with_what_is_used(problem: Problem, after: Scenario) -> Problem:
    if after.system.stage != 0 or problem.path not in [f"reload.{name}" for name in _OF_STAGE_1]:
        return problem
    fields = (field.name for field in dataclasses.fields(ReloadSpec))
    used = ", ".join(name for name in fields if name not in _OF_STAGE_1)
    message = f"{problem.message.removesuffix('.')}; a reload to stage 0 uses {used}."
    return dataclasses.replace(problem, message=message)


def _changed_by(reload: ReloadSpec | None) -> list[str]:
    return [name for name in _PATHS if getattr(reload, name, None) is not None]
