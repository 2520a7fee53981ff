"""Runs of a case's second layout, which must give the same state bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from zero_sim.findings.records import CaseResult, Finding
from zero_sim.scenario.checks import Check
from zero_sim.scenario.pair import other_layout
from zero_sim.scenario.spec import ExpectSpec, Scenario
from zero_sim.targets import Target
from zero_sim.targets.declared import has_own_rule
from zero_sim.targets.recorded import Record, Recording

_UPDATED = (Check.EQUALITY_STATE, Check.EQUALITY_MASTER, Check.EQUALITY_PARAMS)


def record_layout(
    scenario: Scenario, target: Target, *, judge: Callable[[Scenario, Target], CaseResult]
) -> tuple[Record, CaseResult | None]:
    """Run a case in its second layout; `judge` judges it on simulated ranks.

    Returns:
        Params and state after each step, and the result if the second layout itself has findings or
        cannot run.
    """
    record = Record()
    # An expected finding belongs to the case, not to its second layout.
    expect = ExpectSpec(nonzero_min=scenario.expect.nonzero_min)
    other = replace(other_layout(scenario), expect=expect)
    result = judge(other, Recording(target, record))
    # If a layout cannot run, neither can the case.
    if result.verdict == "error":
        return record, result
    found = result.findings if result.verdict == "fail" else ()
    if scenario.optimizer.name == "own" and not has_own_rule(target):
        # Without a declared update rule, a single layout cannot check updates.
        found = tuple(each for each in found if each.check not in _UPDATED)
    if not found:
        return record, None
    return record, replace(result, findings=tuple(map(_of_second, found)))


def _of_second(finding: Finding) -> Finding:
    line = "found in the second layout of the pair"
    # In the detail, because findings with equal messages count as the same.
    return replace(finding, detail=f"{line}\n{finding.detail}".rstrip())
