"""fp16 sum that overflows in some orders of addition, in a world of unknown order."""

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


def test_possible_overflow_expects_no_gathers():
    """The order decides if the step is skipped, and so which collectives follow."""
    result = run_case(SCENARIO)
    assert result.verdict == "inconclusive"
    assert {finding.check.area for finding in result.findings} == {"guard"}


def test_gathers_are_expected_if_no_order_overflows():
    """The same case with a smaller loss scale."""
    scaled = replace(SCENARIO, optimizer=OptimizerSpec(loss_scale=LossScaleSpec(initial=64.0)))
    assert run_case(scaled).verdict == "pass"
