"""Inference of the point at which a target reports gradients, if it declares none."""

from dataclasses import replace

import pytest

from tests.judge.ruled import Target as Ruled
from tests.run.summing import CASE, Target
from zero_sim import run_case
from zero_sim.findings.records import taken_notes
from zero_sim.run import runner
from zero_sim.scenario.spec import OptimizerSpec, WorldSpec
from zero_sim.targets import (
    find_target,
    library_target_names,
    numerics_of,
    target_names,
    why_missing,
)

SGD = replace(CASE, optimizer=OptimizerSpec(name="sgd"))
CLIPPED = replace(CASE, optimizer=OptimizerSpec(clip_norm=0.01))
CLIPS = {
    "follows": ("optimizer.clip_norm",),
    "norm": "of-params",
    "clip": "fp32-reciprocal",
    "shows": True,
}


def taken(result):
    return [
        note.partition("reported_grads = ")[2].partition(",")[0] for note in taken_notes(result)
    ]


@pytest.mark.parametrize(
    ("target", "scenario", "expected"),
    [
        (Target(shows=True), CASE, ["'after-division'"]),
        (Target("adamw", shows=True), CASE, ["'after-division'"]),
        (Target(shows=True, keeps=True), CASE, []),
        (Target(**CLIPS), CLIPPED, []),
        (Target(**CLIPS), CASE, ["'after-clip'"]),
        (Ruled({"told": "after-division"}), CASE, ["'after-division'"]),
    ],
    ids=["means", "means, without sgd", "sums", "not observed", "clipped", "parts"],
)
def test_fitting_point_is_inferred_and_noted(pool, target, scenario, expected):
    result = run_case(scenario, pool=pool, target=target)
    assert (result.verdict, taken(result)) == ("pass", expected)


def test_point_is_inferred_once_per_target(pool, monkeypatch):
    judged = []

    def judge(scenario, *args, **named):
        judged.append(scenario.name)
        return judge_case(scenario, *args, **named)

    judge_case = runner.judge_case
    monkeypatch.setattr(runner, "judge_case", judge)
    target = Target(shows=True)
    for name in ("first", "second"):
        assert run_case(replace(CASE, name=name), pool=pool, target=target).verdict == "pass"
    assert (judged.count("first"), judged.count("second")) == (2, 1)
    assert judged[-1] == "second"


def test_declared_point_is_not_changed(pool):
    target = Target(shows=True, reported_grads="before-division")
    result = run_case(CASE, pool=pool, target=target)
    assert result.findings[0].check == "equality.grad"
    assert "declare Numerics(reported_grads='after-division')" in result.findings[0].detail
    assert taken(result) == []


def test_gradient_wrong_at_every_point_is_a_finding(pool):
    # Divides by 3, twice the declared divisor.
    target = Target(shows=True, divide_by=1.5)
    result = run_case(SGD, pool=pool, target=target)
    assert (result.verdict, result.findings[0].check) == ("fail", "equality.grad")
    assert taken(result) == []


def test_unproven_division_is_not_observed(pool):
    """Sums fit, but with AdamW only, which cannot show the division."""
    target = Target("adamw", shows=True, averages=False)
    result = run_case(CASE, pool=pool, target=target)
    assert (result.verdict, result.scope, taken(result)) == ("pass", "params-only", [])
    assert "division of gradients" in result.unobserved


def test_point_is_inferred_in_unknown_order(pool):
    case = replace(CASE, world=WorldSpec(size=3, order_known=False))
    result = run_case(case, pool=pool, target=Ruled({"told": "after-division"}))
    assert (result.verdict, taken(result)) == ("pass", ["'after-division'"])


SHIPPED = [
    name
    for name in (*target_names(), *library_target_names())
    if not why_missing(find_target(name))
]


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_target_declares_the_point(name):
    assert numerics_of(find_target(name), CASE).reported_grads is not None
