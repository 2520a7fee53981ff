"""Answers of an engine's step beside what the reference has: its norm, its scale, its skipping."""

from __future__ import annotations

from collections.abc import Iterator

from zero_sim.findings import describe as findings
from zero_sim.findings.records import Finding
from zero_sim.judge.step_digests import StepDigests
from zero_sim.reference import BoundedStep, ReferenceStep
from zero_sim.scenario.spec import OptimizerSpec
from zero_sim.targets import StepResult


def check_result(
    result: StepResult,
    expected: ReferenceStep | BoundedStep | StepDigests,
    *,
    optimizer: OptimizerSpec,
    unobserved: set[str],
    step: int,
    rank: int,
) -> Iterator[Finding]:
    """Check that an engine says what it has to say, and no other things than happened.

    Args:
        result: What it says.
        expected: The step as the reference took it.
        optimizer: The case's optimizer.
        unobserved: What it does not say is added to this.
        step: Index of the step, from 0.
        rank: The rank, within the judged group.
    """
    reported = {"norm": result.norm, "zeros": result.zeros, "skipped": result.skipped}
    unobserved.update(name for name, got in reported.items() if got is None)
    if all(got is None for got in (*reported.values(), result.loss_scale)):
        # It tells nothing of its steps; one that does so tells what it clips or scales by.
        return
    if result.norm is None and optimizer.clip_norm is not None:
        yield findings.misreported("norm", step, rank, expected=float(expected.norm), got=None)
    if result.loss_scale is None and optimizer.loss_scale is not None:
        yield findings.misreported("loss_scale", step, rank, expected=expected.loss_scale, got=None)
    said = (("skipped", result.skipped), ("loss_scale", result.loss_scale))
    for name, got in said:
        wanted = getattr(expected, name)
        if got is not None and got != wanted:
            yield findings.misreported(name, step, rank, expected=wanted, got=got)
