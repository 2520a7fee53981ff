"""Comparison with one device, for ranks with the same data."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zero_sim import run_case
from zero_sim.scenario.rules import check_scenario
from zero_sim.scenario.spec import (
    DataSpec,
    ExpectSpec,
    FaultSpec,
    ModelSpec,
    OptimizerSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    WorldSpec,
)


def same_data(size: int, *, divide: str = "none", loss: str = "mean-of-ranks") -> Scenario:
    """Ranks with the same data, checked against one device."""
    return Scenario(
        schema=1,
        model=ModelSpec(name="mlp", hidden=8, blocks=1),
        data=DataSpec(ranks="same", loss=loss),
        world=WorldSpec(size=size),
        system=SystemSpec(divide=divide),
        optimizer=OptimizerSpec(name="sgd"),
        run=RunSpec(steps=2, micro_batches=2),
        expect=ExpectSpec(one_device=True),
    )


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("divide", "loss"), [("none", "mean-of-ranks"), ("pre", "mean")])
def test_one_two_and_four_ranks_equal_one_device(size: int, divide: str, loss: str) -> None:
    result = run_case(same_data(size, divide=divide, loss=loss))
    assert result.verdict == "pass", result.findings


@pytest.mark.parametrize("size", [3, 5, 6, 7, 8])
def test_other_numbers_of_ranks_differ_from_one_device(size: int) -> None:
    result = run_case(same_data(size))
    assert {finding.check for finding in result.findings} == {"invariant.one-device"}
    first = result.findings[0]
    assert first.differ_count
    assert f"{first.differ_count} of {first.compared_count} elements differ" in first.message


def test_division_after_the_sum_is_checked() -> None:
    assert run_case(same_data(2, divide="post", loss="mean")).verdict == "pass"
    found = run_case(same_data(7, divide="post", loss="mean")).findings
    assert {finding.check for finding in found} == {"invariant.one-device"}


def test_repeated_contribution_is_found() -> None:
    """On 2 ranks, where a right system passes."""
    fault = FaultSpec(kind="duplicate", rank=0, collective="reduce_scatter")
    found = run_case(replace(same_data(2), faults=(fault,))).findings
    assert "invariant.one-device" in {finding.check for finding in found}


@pytest.mark.parametrize(
    "change",
    [
        {"data": DataSpec()},
        {"data": DataSpec(ranks="same")},
        {"system": SystemSpec(divide="post")},
        {"system": SystemSpec(divide="none", sync="every")},
    ],
)
def test_one_device_is_refused_without_its_conditions(change: dict[str, object]) -> None:
    problems = check_scenario(replace(same_data(2), **change))
    assert {problem.path for problem in problems} == {"expect.one_device"}
