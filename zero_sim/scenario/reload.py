"""Rules about the case after its checkpoint, in another world with another layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from zero_sim.errors import Problem
from zero_sim.scenario.applies import APPLIES, Applies
from zero_sim.scenario.conditions import CONDITIONS, Condition
from zero_sim.scenario.fields import default_at, describe_value, show
from zero_sim.scenario.fitting import RELOADED, after_reload, reloaded, with_reloaded
from zero_sim.scenario.spec import ReloadSpec, Scenario


def placed_in_reload(problem: Problem, reload: ReloadSpec) -> Problem:
    """Return a problem after the checkpoint with its field's path in `reload`."""
    for name, path in reloaded(reload).items():
        if path == problem.path:
            return dataclasses.replace(problem, path=f"reload.{name}")
    return problem


def check_async_steps(scenario: Scenario) -> Iterator[Problem]:
    """Check that an asynchronous save is complete when the run ends."""
    after, steps = scenario.reload, scenario.run.steps
    # A condition reports a checkpoint outside the run.
    if after is None or not 1 <= after.step < steps:
        return
    left = steps - after.step
    if after.async_steps > left:
        yield Problem(
            path="reload.async_steps",
            message=f"expected at most {left}, because run.steps = {steps} and "
            f"reload.step = {after.step}, got {describe_value(after.async_steps)}.",
            suggestion=f"Try {left}, or more run.steps.",
        )


def check_after_reload(scenario: Scenario) -> Iterator[Problem]:
    """Check the rules over several fields for the case after its checkpoint."""
    if scenario.reload is None:
        return
    after = after_reload(scenario)
    for rule in (*APPLIES, *CONDITIONS):
        # If a rule is also broken before the checkpoint, this has been reported.
        if rule.holds_after and not rule.broken(scenario):
            for problem in rule.check(after):
                placed = placed_in_reload(problem, scenario.reload)
                if placed.path == problem.path:
                    placed = _at_reload_field(problem, rule, scenario.reload)
                yield _with_own_names(placed, scenario.reload)
    yield from _set_without_use(scenario, scenario.reload)


def _set_without_use(scenario: Scenario, reload: ReloadSpec) -> Iterator[Problem]:
    """Check that each setting in the reload has an effect after the checkpoint."""
    # Not `after_reload`, which resets settings without effect, so that these would be ignored.
    as_written = with_reloaded(scenario)
    set_here = set(reloaded(reload).values())
    for row in APPLIES:
        if row.path in set_here and not row.holds_after:
            for problem in row.check(as_written):
                yield _with_own_names(placed_in_reload(problem, reload), reload)


def _at_reload_field(problem: Problem, rule: Applies | Condition, reload: ReloadSpec) -> Problem:
    """Return a kept setting's problem with the path of the reload field that causes it."""
    # The rule holds before the checkpoint, so a replaced field breaks it.
    made_by = next(
        name
        for name, path in reloaded(reload).items()
        if any(f"{path}.".startswith(f"{read}.") for read in rule.reads)
    )
    own = next((name for name, path in RELOADED.items() if path == problem.path), None)
    # If the reload has no field for the kept setting, the rule's remedy stays.
    if own is None:
        return dataclasses.replace(problem, path=f"reload.{made_by}")
    return Problem(
        path=f"reload.{made_by}",
        message=f"{problem.message.removesuffix('.')}, kept from {problem.path}.",
        suggestion=f"Also write {own} = {show(default_at(problem.path))}, or leave it out.",
    )


def _with_own_names(problem: Problem, reload: ReloadSpec) -> Problem:
    """Return the problem with paths replaced by the reload's own fields."""
    message, suggestion = problem.message, problem.suggestion
    for name, path in reloaded(reload).items():
        # The user wrote `reload.stage`, so a message about `system.stage` would mislead.
        message = message.replace(f"{path} =", f"reload.{name} =")
        suggestion = suggestion.replace(f"{path} =", f"reload.{name} =")
    return dataclasses.replace(problem, message=message, suggestion=suggestion)
