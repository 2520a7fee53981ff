"""Guarantees of reduced gradients: certified elements are equal in every order."""

from typing import get_args

import pytest

from zero_sim.scenario.spec import (
    DataSpec,
    ModelSpec,
    OptimizerSpec,
    OrderName,
    RunSpec,
    SystemSpec,
    WorldSpec,
)
from zero_sim.sim import order_backends

SHAPES = ((3, 5), (7,), (), (41,))
EXACT = [
    ModelSpec(name="bit-hash", shapes=SHAPES, dtype="bf16"),
    ModelSpec(name="bit-hash", shapes=SHAPES, dtype="fp32"),
    ModelSpec(name="ternary", dtype="bf16"),
    ModelSpec(name="ternary", dtype="fp32"),
]
SGD = OptimizerSpec(name="sgd", lr=0.0625)


@pytest.mark.parametrize("order", get_args(OrderName))
@pytest.mark.parametrize("model", EXACT, ids=lambda model: f"{model.name}-{model.dtype}")
def test_exact_case_passes_in_any_assumed_order(judged, monkeypatch, model, order):
    """The cluster adds in random trees, while the oracle assumes another order."""
    monkeypatch.setitem(order_backends.ORDERS, order, order_backends.ORDERS["random-tree"])
    result = judged(
        model=model,
        world=WorldSpec(size=5, order=order),
        system=SystemSpec(bucket_elems=50),
        optimizer=SGD,
        run=RunSpec(steps=3, micro_batches=2, seed=3),
    )
    assert result.verdict == "pass", result.findings
    assert result.guarantees.keys() == {"order-free"}
    assert any("order-free" in note for note in result.notes)


def test_ordinary_case_fails_in_another_order(judged, monkeypatch):
    monkeypatch.setitem(order_backends.ORDERS, "linear", order_backends.ORDERS["random-tree"])
    assert judged(world=WorldSpec(size=5)).verdict == "fail"


@pytest.mark.parametrize(
    ("size", "redundancy", "row"),
    [(1, 1, "one-sum"), (2, 1, "one-sum"), (4, 2, "one-sum"), (3, 1, "modelled-order")],
)
def test_ordinary_case_is_compared_in_its_order(judged, size, redundancy, row):
    result = judged(world=WorldSpec(size=size), system=SystemSpec(redundancy=redundancy))
    params = 2 * (20 * 5 + 20 + 5 * 20 + 5)
    assert result.guarantees == {row: 2 * params}
    assert result.as_dict()["guarantees"] == {row: 2 * params}


@pytest.mark.parametrize("divide", ["pre", "premul"])
def test_rounding_before_the_sum_is_not_order_free(judged, divide):
    """A third of an integer is not an integer, so the case reports that it proves nothing."""
    result = judged(
        model=ModelSpec(name="ternary", dtype="bf16"),
        world=WorldSpec(size=3),
        system=SystemSpec(divide=divide),
    )
    assert result.verdict == "inconclusive"
    assert result.findings[0].check == "guard.not-order-free"


def test_quarter_before_the_sum_is_order_free(judged):
    result = judged(
        model=ModelSpec(name="ternary", dtype="bf16"),
        world=WorldSpec(size=4, order="random-tree"),
        system=SystemSpec(divide="pre"),
    )
    assert result.verdict == "pass", result.findings
    assert result.guarantees.keys() == {"order-free"}


def test_too_many_rows_are_inconclusive(judged):
    result = judged(
        model=ModelSpec(name="ternary", dtype="bf16"),
        world=WorldSpec(size=3),
        data=DataSpec(rows=5000),
        run=RunSpec(steps=1),
    )
    assert [finding.check for finding in result.findings] == ["guard.not-order-free"]
