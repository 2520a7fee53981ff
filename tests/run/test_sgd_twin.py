"""A case that passes by params only is judged again, with SGD."""

from dataclasses import replace
from functools import partial

import pytest

from tests.run.summing import CASE, Target
from zero_sim import run_case
from zero_sim.run.sgd_twin import marked, twin_of, with_twin
from zero_sim.scenario.rules import check_scenario
from zero_sim.scenario.spec import (
    DataSpec,
    ExpectSpec,
    FaultSpec,
    LossScaleSpec,
    ModelSpec,
    NanSpec,
    OptimizerSpec,
    ParamGroupSpec,
    ReloadSpec,
    RunSpec,
)

SGD = replace(CASE, optimizer=OptimizerSpec(name="sgd"))


@pytest.fixture
def judge(pool):
    """Judge a case as the commands do."""

    def judge(target, scenario=CASE):
        alone = partial(run_case, pool=pool, target=target)
        return with_twin(alone(scenario), scenario, judge=alone, find=lambda: target)

    return judge


@pytest.mark.parametrize(
    ("target", "scenario", "scope"),
    [
        (Target(), CASE, "params-only"),
        (Target(), SGD, "params-only"),
        (Target(shows=True, reported_grads="after-division"), CASE, "full"),
        (Target(shows=True, keeps=True, reported_grads="before-division"), CASE, "params-only"),
        (Target(shows=True, keeps=True, reported_grads="before-division"), SGD, "full"),
        (Target(shows=True, divide="none", averages=False), CASE, "full"),
    ],
    ids=["params", "params of sgd", "means", "sums", "sums and sgd", "nothing is divided"],
)
def test_scope_is_full_if_the_averaged_gradient_is_observed(pool, target, scenario, scope):
    result = run_case(scenario, pool=pool, target=target)
    assert (result.verdict, result.scope) == ("pass", scope)


def test_masters_and_state_give_full_scope(judged):
    assert judged().scope == "full"


@pytest.mark.parametrize("numerics", [{}, {"shows": True, "reported_grads": "before-division"}])
def test_missing_division_is_found_with_sgd(judge, pool, numerics):
    target = Target(averages=False, **numerics)
    assert run_case(CASE, pool=pool, target=target).verdict == "pass"
    result = judge(target)
    assert (result.verdict, result.id) == ("fail", "case")
    assert result.findings[0].check == "equality.params"
    assert "found with SGD in place of AdamW" in result.findings[0].detail
    # A bundle and a command repeat the twin alone.
    assert run_case(result.twin, pool=pool, target=target).verdict == "fail"


def test_right_target_passes_with_a_note_on_the_variant(judge):
    result = judge(Target())
    assert (result.verdict, result.scope, result.twin) == ("pass", "params-only", None)
    assert "passes with SGD in place of AdamW, too" in result.notes[-1]


def test_target_that_refuses_sgd_has_no_variant(judge):
    result = judge(Target("adamw", averages=False))
    assert (result.verdict, result.scope) == ("pass", "params-only")
    assert result.notes[-1].startswith(
        "no variant with SGD in place of AdamW was judged: optimizer.name: "
    )


@pytest.mark.parametrize(
    "scenario",
    [
        SGD,
        replace(CASE, expect=ExpectSpec(finding="equality.params")),
        replace(CASE, faults=(FaultSpec(kind="slow", rank=0),)),
    ],
    ids=["sgd", "a finding that is expected", "a planned fault"],
)
def test_other_cases_have_no_variant(scenario):
    target = Target(averages=False)
    judged = replace(run_case(CASE, target=target), id="the case itself")
    judged = replace(judged, unobserved=() if scenario is SGD else judged.unobserved)
    assert with_twin(judged, scenario, judge=pytest.fail, find=lambda: target) is judged


def test_variant_omits_settings_that_hide_a_factor():
    optimizer = OptimizerSpec(
        name="rmsprop", momentum=0.9, weight_decay=0.1, clip_norm=0.1, clip_value=0.1,
        groups=(ParamGroupSpec(match="p0", lr=0.5),), loss_scale=LossScaleSpec(),
    )  # fmt: skip
    twin = twin_of(replace(CASE, optimizer=optimizer))
    expected = OptimizerSpec(name="sgd", lr=1.0, loss_scale=LossScaleSpec())
    assert twin.optimizer == expected
    assert twin.name == "case with SGD in place of RMSprop"


@pytest.mark.parametrize(
    "changed",
    [
        {"reload": ReloadSpec(step=2)},
        {"data": DataSpec(nan=NanSpec(step=2, rank=0))},
        {"optimizer": OptimizerSpec(warmup_steps=2, amsgrad=True)},
        {"run": RunSpec(steps=3, micro_batches=2, own_micro_batches=(1, 2))},
        {"expect": ExpectSpec(accuracy_min=0.5), "model": ModelSpec(name="digits")},
        {"name": "x" * 1000},
    ],
    ids=str,
)
def test_variant_is_a_valid_case_of_one_step(changed):
    twin = twin_of(replace(CASE, **changed))
    assert check_scenario(twin) == []
    assert (twin.run.steps, twin.reload, twin.data.nan) == (1, None, None)


def test_finding_is_marked_once(judge):
    result = judge(Target(averages=False))
    assert marked(result, result.twin) == result


def test_findings_of_other_cases_are_not_marked(pool):
    target = Target(averages=False)
    result = run_case(SGD, pool=pool, target=target)
    assert marked(result, SGD) is result
