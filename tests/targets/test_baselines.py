"""Baseline targets on a single device."""

from dataclasses import replace

import pytest

from zero_sim import run_case
from zero_sim.calculators.footprint import single_device
from zero_sim.calculators.measure import measure
from zero_sim.scenario.spec import (
    ModelSpec,
    OptimizerSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    WorldSpec,
)

ALONE = Scenario(
    schema=1,
    model=ModelSpec(name="mlp", hidden=5),
    world=WorldSpec(size=1),
    system=SystemSpec(target="single-device", stage=0),
    run=RunSpec(steps=2, micro_batches=2),
)


@pytest.mark.parametrize("name", ["adamw", "sgd", "rprop"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("clip", [{}, {"clip_norm": 0.1}, {"clip_value": 0.001}])
def test_single_device_equals_the_reference(name, dtype, clip):
    for target in ("single-device", "single-device-keeping-grads"):
        case = replace(
            ALONE,
            model=replace(ALONE.model, dtype=dtype),
            system=replace(ALONE.system, target=target),
            optimizer=OptimizerSpec(name=name, **clip),
        )
        result = run_case(case)
        assert result.verdict == "pass", result.findings


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("keeps", [False, True])
def test_resident_bytes_equal_the_closed_form(dtype, keeps):
    target = "single-device-keeping-grads" if keeps else "single-device"
    case = replace(
        ALONE, model=replace(ALONE.model, dtype=dtype), system=replace(ALONE.system, target=target)
    )
    measured = measure(case)
    owed = single_device(
        measured.sizes[0], scenario=case, keeps_grads=keeps, has_masters=dtype != "fp32"
    )
    held = measured.ledgers[0].between
    assert {name: held.get(name, 0) for name in owed} == dict(owed)


def test_several_ranks_are_refused():
    result = run_case(replace(ALONE, world=WorldSpec(size=2)))
    assert result.verdict == "error"
    assert "expected at most 1 data-parallel ranks, got 2" in str(result.error)
