"""A sum in fp16 that overflows in some orders of addition, which nobody is told."""

from __future__ import annotations

from dataclasses import replace

from zero_sim import run_case
from zero_sim.scenario.spec import (
    LossScaleSpec,
    ModelSpec,
    OptimizerSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    WorldSpec,
)

SCENARIO = Scenario(
    schema=1,
    name="overflow",
    model=ModelSpec(name="mlp", dtype="fp16", hidden=7, blocks=1),
    world=WorldSpec(size=3, order_known=False),
    system=SystemSpec(bucket_elems=1),
    optimizer=OptimizerSpec(loss_scale=LossScaleSpec(initial=131072.0)),
    run=RunSpec(steps=1),
)


def test_a_skipped_step_owes_no_gathers():
    """Whether the step is skipped is not owed, and what it calls follows from whether it was."""
    result = run_case(SCENARIO)
    assert result.verdict == "inconclusive"
    assert {finding.check.area for finding in result.findings} == {"guard"}


def test_where_no_order_overflows_the_gathers_are_owed():
    """The same with a scale at which sums stay finite."""
    scaled = replace(SCENARIO, optimizer=OptimizerSpec(loss_scale=LossScaleSpec(initial=64.0)))
    assert run_case(scaled).verdict == "pass"
