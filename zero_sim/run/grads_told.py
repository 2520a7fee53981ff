"""Point of the step at which a target reports gradients, worked out if it declares none.

An undeclared target is judged as if it reported sums. At the first reduced gradient that differs,
small cases decide between the sum, the mean and the clipped gradient, once per target. A point
counts only if gradients and params match, and something shows the division.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableSequence
from dataclasses import replace
from typing import Any, get_args

from zero_sim.errors import EnvironmentProblem
from zero_sim.findings.records import TAKEN, CaseResult
from zero_sim.run.rule_cases import BASE, changed, with_model
from zero_sim.scenario.checks import Check
from zero_sim.scenario.spec import ModelName, OptimizerSpec, Scenario
from zero_sim.targets import Numerics, Target, capabilities_of, numerics_of, refusals
from zero_sim.targets.adapt import GRADIENTS
from zero_sim.targets.numerics import GradsTold
from zero_sim.workloads import EXACT_MODELS

_CLIP_NORM = 0.01

Known = MutableSequence[tuple[Target, GradsTold | None]]
"""Targets whose point was worked out, with the point; None if no point fits."""
Judge = Callable[[Scenario, GradsTold | None], CaseResult]


class ToldAt:
    """A target with a declared point.

    Args:
        target: Target that declares none.
        point: The point.
    """

    def __init__(self, target: Target, point: GradsTold) -> None:
        self._target = target
        self._point: GradsTold = point
        self.name = target.name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def build(self, module: Any, **named: Any) -> Any:
        """Build the engine of the target."""
        return self._target.build(module, **named)

    def numerics(self, scenario: Scenario) -> Numerics:
        """Rules of the target, with the point."""
        return replace(numerics_of(self._target, scenario), grads_told=self._point)


def judge_as_told(scenario: Scenario, target: Target, *, judge: Judge, known: Known) -> CaseResult:
    """Judge a case by the point that the target declares, or that fits it.

    Args:
        scenario: The case.
        target: The system under test.
        judge: Judges any case with the target by a point; by the declared one if None.
        known: What was worked out so far; grows.

    Returns:
        The result, with a note on the point if one was worked out.
    """
    points = [point for each, point in known if each is target]
    if not points:
        result = judge(scenario, None)
        if not _may_be_told_elsewhere(result, target, scenario):
            return result
        points = [_work_out(target, judge=judge)]
        known.append((target, points[0]))
        if points[0] is None:
            return result
    (point,) = points
    result = judge(scenario, point)
    return result if point is None else _with_note(result, point)


def _may_be_told_elsewhere(result: CaseResult, target: Target, scenario: Scenario) -> bool:
    """True if a gradient differs and the target declares no point."""
    differs = bool(result.findings) and result.findings[0].check == Check.EQUALITY_GRAD
    return differs and numerics_of(target, scenario).grads_told is None


def _work_out(target: Target, *, judge: Judge) -> GradsTold | None:
    """The point that fits cases of 3 ranks, with SGD if the target has it; None if none does."""
    fitting: list[GradsTold] = []
    for case in _cases(target):
        try:
            now = [point for point in fitting or get_args(GradsTold) if _shows(judge(case, point))]
        except EnvironmentProblem:
            break  # So many ranks cannot be run here.
        if not now:
            break
        fitting = now
    return fitting[0] if fitting else None


def _with_note(result: CaseResult, point: GradsTold) -> CaseResult:
    note = (
        f"{TAKEN}grads_told = {point!r}, because cases of 3 ranks match by it. Declare "
        f"Numerics(grads_told={point!r})"
    )
    return replace(result, notes=(*result.notes, note))


def _shows(result: CaseResult) -> bool:
    """True if gradients, their division and params were all observed and match."""
    is_observed = result.scope == "full" and GRADIENTS not in result.unobserved
    return result.verdict == "pass" and is_observed


def _cases(target: Target) -> Iterator[Scenario]:
    """The plainest case that the target can run, and the same with clipping if it can."""
    able = capabilities_of(target)
    models: list[ModelName] = ["mlp", "params", *able.models]
    models = [name for name in models if name not in EXACT_MODELS]
    optimizers = [OptimizerSpec(name=name, lr=0.1) for name in able.optimizers]
    optimizers.sort(key=lambda optimizer: optimizer.name != "sgd")
    plain = (
        changed(
            with_model(BASE, model),
            optimizer=optimizer,
            system={"stage": stage},
            model={"dtype": dtype},
        )
        for optimizer in optimizers
        for dtype in able.dtypes
        for stage in able.stages
        for model in models
    )
    case = next((case for case in plain if not refusals(target, case)), None)
    if case is None:
        return
    yield case
    clipped = changed(case, optimizer=replace(case.optimizer, clip_norm=_CLIP_NORM))
    if not refusals(target, clipped):
        yield clipped
