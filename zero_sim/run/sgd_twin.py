"""Twin: the same case with a step of SGD, if the division of gradients was not observed.

Adam and most other optimizers divide a gradient by its size, so params do not show if the gradient
was averaged. A step of SGD with learning rate 1 shows it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from zero_sim.findings.records import CaseResult
from zero_sim.scenario.fitting import without_unused
from zero_sim.scenario.rules import check_scenario
from zero_sim.scenario.spec import ExpectSpec, OptimizerSpec, Scenario
from zero_sim.targets import Target, class_of, refusals
from zero_sim.targets.adapt import DIVISION

TWIN_EVERY = 5
"""Fuzzing and conformance judge a twin once in this many cases. Targets with SGD run such cases
anyway."""
_LR = 1.0
"""Large, so that a param in any dtype shows its gradient's size."""
_NAME_CHARS_MAX = 900
_WITH_SGD = re.compile(r" (with SGD in place of \w+)$")

Judge = Callable[[Scenario], CaseResult]


def with_twin(
    result: CaseResult, scenario: Scenario, *, judge: Judge, find: Callable[[], Target]
) -> CaseResult:
    """Judge a case's twin if the case did not show how gradients are divided.

    Args:
        result: Result of the case.
        scenario: The case that gave `result`.
        judge: Judges a case without its twin.
        find: Returns the system under test; called if a twin is needed.

    Returns:
        If the twin fails, its result, with the twin in `twin`. Otherwise `result`, with a note if a
        twin is needed.
    """
    is_hidden = result.verdict == "pass" and DIVISION in result.unobserved
    # Planned faults and expected findings belong to the case's own calls and steps.
    if not is_hidden or scenario.faults or scenario.expect.finding:
        return result
    twin = twin_of(scenario)
    # The target may lack SGD, or SGD may not go with other settings.
    problems = [*check_scenario(twin), *refusals(find(), twin)]
    if problems:
        why = f"{problems[0].path}: {problems[0].message}"
        if problems[0].path == "optimizer.name":
            why += " If the engine has SGD, add 'sgd' to Capabilities.optimizers"
        return _noted(result, f"no variant {_how(twin)} was judged: {why}")
    judged = judge(twin)
    if judged.verdict == "pass":
        return _noted(result, f"passes {_how(twin)}, too, which shows the division of gradients")
    # A twin that is inconclusive or ends with an error proves nothing about the case.
    if judged.verdict != "fail":
        why = judged.error or ", ".join(each.check for each in judged.findings)
        return _noted(result, f"the variant {_how(twin)} showed nothing: {judged.verdict}, {why}")
    seconds = result.seconds + judged.seconds
    return replace(marked(judged, twin), id=result.id, seconds=seconds, twin=twin)


def twin_of(scenario: Scenario) -> Scenario:
    """Return the case with a plain step of SGD.

    It has no clipping, momentum or small learning rate, which hide a gradient's size.
    """
    # Leave room for the suffix, because names are limited to 1,000 characters.
    name = scenario.name[:_NAME_CHARS_MAX]
    expect = ExpectSpec(
        nonzero_min=scenario.expect.nonzero_min, one_device=scenario.expect.one_device
    )
    # The old optimizer's settings have no effect now, and would be refused.
    return without_unused(
        replace(
            scenario,
            name=f"{name} with SGD in place of {class_of(scenario.optimizer).__name__}",
            model=replace(scenario.model, freeze=()),
            data=replace(scenario.data, nan=None),
            optimizer=OptimizerSpec(name="sgd", lr=_LR, loss_scale=scenario.optimizer.loss_scale),
            run=replace(scenario.run, steps=1),
            reload=None,
            pair=None,
            expect=expect,
        )
    )


def marked(result: CaseResult, scenario: Scenario) -> CaseResult:
    """Return the result; if the case is a twin, its first finding names the variant."""
    if not result.findings or not _WITH_SGD.search(scenario.name):
        return result
    first, *others = result.findings
    # In the detail, because findings with equal messages count as the same.
    line = (
        f"found {_how(scenario)}, which hides the size of a gradient from params. If the "
        "engine has no SGD, leave 'sgd' out of Capabilities.optimizers"
    )
    # Do not mark twice, because shrinking marks results again.
    if first.detail.startswith(line):
        return result
    detail = f"{line}\n{first.detail}".rstrip()
    return replace(result, findings=(replace(first, detail=detail), *others))


def _how(twin: Scenario) -> str:
    found = _WITH_SGD.search(twin.name)
    assert found is not None
    return found[1]


def _noted(result: CaseResult, note: str) -> CaseResult:
    return replace(result, notes=(*result.notes, note))
