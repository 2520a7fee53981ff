"""Inference of the point in a step at which a target reports gradients.

A target without a declared point is first judged as if it reported sums. If a reduced gradient
differs, small cases decide between sum, mean and clipped gradient, once per target. A point fits
only if gradients and params match, and the division is observed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableSequence
from dataclasses import replace
from typing import Any, get_args

from zero_sim.errors import EnvironmentProblem
from zero_sim.findings.records import TAKEN, CaseResult
from zero_sim.run.small_cases import BASE, changed, with_model
from zero_sim.scenario.checks import Check
from zero_sim.scenario.spec import AnyModelName, OptimizerSpec, Scenario
from zero_sim.targets import Numerics, Target, capabilities_of, numerics_of, refusals
from zero_sim.targets.adapt import GRADIENTS
from zero_sim.targets.numerics import ReportedGrads
from zero_sim.workloads import EXACT_MODELS

# Small, so that every gradient is clipped, and differs from the mean.
_CLIP_NORM = 0.01

Point = MutableSequence[ReportedGrads | None]
"""A target's inferred point as the only entry, None if none fits; empty before the inference."""
Judge = Callable[[Scenario, ReportedGrads | None], CaseResult]


class WithReportPoint:
    """A target with a point added to its numerics, at which it reports gradients."""

    def __init__(self, target: Target, point: ReportedGrads) -> None:
        self._target = target
        self._point: ReportedGrads = point
        self.name = target.name

    def __getattr__(self, name: str) -> Any:
        # For everything else that the target declares.
        return getattr(self._target, name)

    def build(self, module: Any, **named: Any) -> Any:
        """Build the target's engine."""
        return self._target.build(module, **named)

    def numerics(self, scenario: Scenario) -> Numerics:
        """Return the target's numerics with the point."""
        return replace(numerics_of(self._target, scenario), reported_grads=self._point)


def judge_at_report_point(
    scenario: Scenario, *, judge: Judge, find: Callable[[], Target], known: Point
) -> CaseResult:
    """Judge a case with the declared point of its target, or with the point that fits.

    Args:
        scenario: A case of the target.
        judge: Judges any case of the target with a point; None for the declared point.
        find: Returns the target; called if a gradient differs.
        known: The inferred point, if any; filled in by this function.

    Returns:
        The result, with a note on the point if it was inferred.
    """
    if not known:
        result = judge(scenario, None)
        # With another first finding, another point would not help.
        differs = bool(result.findings) and result.findings[0].check == Check.EQUALITY_GRAD
        if not differs or numerics_of(find(), scenario).reported_grads is not None:
            return result
        # Infer at most once per target, even if no point fits.
        known.append(_work_out(find(), judge=judge))
        if known[0] is None:
            return result
    result = judge(scenario, known[0])
    return result if known[0] is None else _with_note(result, known[0])


def _work_out(target: Target, *, judge: Judge) -> ReportedGrads | None:
    """Return the point that fits cases with 3 ranks, with SGD if possible; None if none fits."""
    fitting: list[ReportedGrads] = []
    for case in _cases(target):
        try:
            now = [
                point for point in fitting or get_args(ReportedGrads) if _shows(judge(case, point))
            ]
        except EnvironmentProblem:
            break  # This backend cannot run 3 ranks.
        if not now:
            break
        # Later cases only rule out points that fitted before.
        fitting = now
    return fitting[0] if fitting else None


def _with_note(result: CaseResult, point: ReportedGrads) -> CaseResult:
    note = (
        f"{TAKEN}reported_grads = {point!r}, because cases of 3 ranks match by it. Declare "
        f"Numerics(reported_grads={point!r})"
    )
    return replace(result, notes=(*result.notes, note))


def _shows(result: CaseResult) -> bool:
    """Return True if gradients, their division and params were all observed and match."""
    # A pass without observed gradients would fit every point.
    is_observed = result.scope == "full" and GRADIENTS not in result.unobserved
    return result.verdict == "pass" and is_observed


def _cases(target: Target) -> Iterator[Scenario]:
    """Yield the plainest case that the target can run, then the same with clipping if possible."""
    able = capabilities_of(target)
    models: list[AnyModelName] = ["mlp", "params", *able.models]
    models = [name for name in models if name not in EXACT_MODELS]
    optimizers = [OptimizerSpec(name=name, lr=0.1) for name in able.optimizers]
    # A step of SGD shows the size of a gradient; most other optimizers divide by it.
    optimizers.sort(key=lambda optimizer: optimizer.name != "sgd")
    plain = (
        changed(
            with_model(BASE, model),
            optimizer=optimizer,
            system={"stage": stage},
            model={"dtype": dtype},
        )
        # The order of these loops decides: the first case that the target accepts is taken.
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
