"""Ranks that all see the same data against one device: where that holds, and where it does not."""

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
    """Ranks with the same data, held to what one device computes."""
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
def test_one_two_and_four_ranks_have_the_gradient_of_one_device(
    size: int, divide: str, loss: str
) -> None:
    result = run_case(same_data(size, divide=divide, loss=loss))
    assert result.verdict == "pass", result.findings


@pytest.mark.parametrize("size", [3, 5, 6, 7, 8])
def test_other_numbers_of_ranks_have_not(size: int) -> None:
    result = run_case(same_data(size))
    assert {finding.check for finding in result.findings} == {"invariant.one-device"}
    first = result.findings[0]
    assert first.differ_count
    assert f"{first.differ_count} of {first.compared_count} elements differ" in first.message


def test_a_sum_divided_afterwards_is_held_to_it_too() -> None:
    assert run_case(same_data(2, divide="post", loss="mean")).verdict == "pass"
    found = run_case(same_data(7, divide="post", loss="mean")).findings
    assert {finding.check for finding in found} == {"invariant.one-device"}


def test_a_sum_in_which_a_rank_counts_twice_is_found_by_itself() -> None:
    """With 2 ranks, where a right system passes."""
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
def test_it_is_refused_where_nobody_says_so(change: dict[str, object]) -> None:
    problems = check_scenario(replace(same_data(2), **change))
    assert {problem.path for problem in problems} == {"expect.one_device"}
