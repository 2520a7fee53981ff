"""Hint at the side of the division on which gradients are reported."""

from dataclasses import replace

import pytest

from tests.judge.ruled import Target
from zero_sim import run_case
from zero_sim.backends.worlds import WorldPool
from zero_sim.scenario.spec import ModelSpec, Scenario, SystemSpec, WorldSpec
from zero_sim.targets import Numerics

CASE = Scenario(
    schema=1,
    name="case",
    model=ModelSpec(name="mlp", hidden=3),
    world=WorldSpec(size=3),
    system=SystemSpec(stage=0),
)
UNKNOWN = replace(CASE, world=WorldSpec(size=3, order_known=False))
NARROW = replace(UNKNOWN, model=ModelSpec(name="mlp", hidden=3, dtype="bf16"))
BEFORE, AFTER = (Numerics(reported_grads=f"{side}-division") for side in ("before", "after"))


@pytest.fixture(scope="module")
def pool():
    with WorldPool() as worlds:
        yield worlds


@pytest.mark.parametrize(
    ("scenario", "does", "declared", "right"),
    [
        (CASE, {"told": "after-division"}, BEFORE, "after"),
        (CASE, {}, AFTER, "before"),
        (CASE, {"told": "after-division", "divide": "postmul"}, BEFORE, "after"),
        (UNKNOWN, {"told": "after-division"}, BEFORE, "after"),
        (UNKNOWN, {}, AFTER, "before"),
        (NARROW, {"told": "after-division"}, BEFORE, "after"),
    ],
    ids=["mean", "sum", "mean by a product", "mean in any order", "sum in any order", "bf16"],
)
def test_other_side_of_the_division_is_named(pool, scenario, does, declared, right):
    finding = run_case(scenario, pool=pool, target=Target(does, declared)).findings[0]
    assert finding.check == "equality.grad"
    assert f"{right} the division by 3" in finding.detail
    assert f"Numerics(reported_grads='{right}-division')" in finding.detail


@pytest.mark.parametrize("scenario", [CASE, UNKNOWN], ids=["known", "unknown"])
def test_gradient_that_fits_neither_side_has_no_hint(pool, scenario):
    target = Target({"told": "after-division", "by": 7}, BEFORE)
    finding = run_case(scenario, pool=pool, target=target).findings[0]
    assert finding.check == "equality.grad"
    assert "reported_grads" not in finding.detail
