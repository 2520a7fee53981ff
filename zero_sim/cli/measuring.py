"""Runs behind `--measure` of the calculators: said before it is tried where there is no room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from zero_sim.cli.session import progress
from zero_sim.errors import ScenarioError, UsageError
from zero_sim.host.packages import packages_needed

if TYPE_CHECKING:
    from zero_sim.calculators.counted import Model
    from zero_sim.calculators.measure import Measured
    from zero_sim.scenario.spec import Scenario


def run_all(models: Sequence[Model], *, has_masters: bool) -> list[Measured]:
    """Run what each model is, in each way that was asked for.

    Raises:
        UsageError: It cannot be run.
        EnvironmentProblem: It has no room here.
    """
    with packages_needed():
        from zero_sim.calculators.measure import check_fits, measure
    if not has_masters:
        raise UsageError(
            "expected --measure without --no-masters: our own system keeps fp32 masters. "
            "Try one of them."
        )
    cases = [_case_of(model) for model in models]
    for model in models:
        check_fits(model)
    measured = []
    for case in cases:
        with progress(f"measure {case.name}"):
            measured.append(measure(case))
    return measured


def _case_of(model: Model) -> Scenario:
    """A scenario that trains a model on all ranks of the world.

    Raises:
        UsageError: It would be none, or one that is too large.
    """
    from zero_sim.scenario.rules import check_scenario

    scenario = model.scenario
    if model.counted:
        shapes = tuple((size.elems,) for size in model.laid_out())
        scenario = replace(scenario, model=replace(scenario.model, shapes=shapes))
    elif model.imported:
        raise UsageError(
            f"expected a scenario, or --params, with --measure, got {scenario.name}: without data "
            "and a loss it cannot be run. Try --params with its number of params."
        )
    parts = scenario.topology.tp * scenario.topology.pp
    scenario = replace(scenario, world=replace(scenario.world, size=scenario.world.size * parts))
    problems = check_scenario(scenario)
    if problems:
        raise ScenarioError(scenario.name, problems)
    return scenario
