"""Answers of an engine's step beside what the reference has: its norm, its scale, its skipping."""

from __future__ import annotations

from collections.abc import Iterator

from zero_sim.findings import describe as findings
from zero_sim.findings.records import Finding
from zero_sim.judge.checks.shown import Shown


def check_result(shown: Shown) -> Iterator[Finding]:
    """Check that an engine says what it has to say, and no other things than happened."""
    result, rank, step = shown.result, shown.rank, shown.step
    expected, optimizer = shown.owed.steps.get(step), shown.group.scenario.optimizer
    reported = {"norm": result.norm, "zeros": result.zeros, "skipped": result.skipped}
    shown.group.unobserved.update(name for name, got in reported.items() if got is None)
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
