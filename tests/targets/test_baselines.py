"""The plain baselines, and per-param ZeRO as articles print it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zero_sim.cost.footprint import single_device
from zero_sim.run import run_case
from zero_sim.run.measure import measure
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
def test_one_device_alone_is_the_reference(name, dtype, clip):
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
def test_it_holds_what_its_closed_form_says(dtype, keeps):
    target = "single-device-keeping-grads" if keeps else "single-device"
    case = replace(
        ALONE,
        model=replace(ALONE.model, dtype=dtype),
        system=replace(ALONE.system, target=target),
    )
    measured = measure(case)
    owed = single_device(
        measured.sizes[0], scenario=case, keeps_grads=keeps, has_masters=dtype != "fp32"
    )
    held = measured.ledgers[0].between
    assert {name: held.get(name, 0) for name in owed} == dict(owed)


def test_it_is_refused_on_several_ranks():
    result = run_case(replace(ALONE, world=WorldSpec(size=2)))
    assert result.verdict == "error"
    assert "expected at most 1 data-parallel ranks, got 2" in str(result.error)


def printed(target, *, stage, shapes, size):
    """A case of a printed target on bare params, or on an mlp without shapes."""
    model = ModelSpec(name="params", shapes=shapes) if shapes else ModelSpec(name="mlp", hidden=5)
    return Scenario(
        schema=1,
        model=model,
        world=WorldSpec(size=size),
        system=SystemSpec(target=target, stage=stage),
        run=RunSpec(steps=2),
    )


def test_printed_stage_1_is_right_where_the_ranks_divide_every_param():
    result = run_case(printed("printed-zero1", stage=1, shapes=((4,), (2, 4)), size=4))
    assert result.verdict == "pass", result.findings


@pytest.mark.parametrize("elems", [1, 3, 5, 7])
def test_and_fails_where_they_do_not(elems):
    result = run_case(printed("printed-zero1", stage=1, shapes=((4,), (elems,)), size=4))
    assert [finding.check for finding in result.findings] == ["world.rank-failed"]
    assert "assign a gradient of size" in result.findings[0].message


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_mended_it_is_right_for_every_size(size):
    shapes = ((size - 1,), (size,), (size + 1,), (1,), (0,), (), (2, 3))
    result = run_case(printed("printed-zero1-mended", stage=1, shapes=shapes, size=size))
    assert result.verdict == "pass", result.findings


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_printed_stage_3_frees_before_backward_needs():
    result = run_case(printed("printed-zero3", stage=3, shapes=None, size=2))
    assert [finding.check for finding in result.findings] == ["world.rank-failed"]
    assert "size of tensor a (0)" in result.findings[0].message


@pytest.mark.parametrize("size", [1, 2, 3])
def test_mended_it_does_not(size):
    result = run_case(printed("printed-zero3-mended", stage=3, shapes=None, size=size))
    assert result.verdict == "pass", result.findings
