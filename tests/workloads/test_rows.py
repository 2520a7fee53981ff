"""Rows of a micro-batch, and its loss as a function of them."""

from __future__ import annotations

import math

import pytest
import torch

from zero_sim.scenario.spec import DataSpec, NanSpec, RunSpec, WorldSpec
from zero_sim.workloads import Batch, build_workload

NAMES = ["mlp", "params", "transformer-260", "digits", "unusual", "fp8"]


@pytest.mark.parametrize("name", NAMES)
class TestRows:
    """Row counts of batches."""

    def test_even(self, make_scenario, name):
        workload = build_workload(make_scenario(name, shapes=((3,),), data=DataSpec(rows=5)))
        assert [workload.batch(step=0, rank=r, micro=1).rows for r in range(4)] == [5] * 4

    def test_uneven(self, make_scenario, name):
        """Rank r has r % 3 more rows in inputs and targets, except for factors of bare params."""
        data = DataSpec(rows=5, uneven_rows=True)
        workload = build_workload(make_scenario(name, shapes=((3,),), data=data))
        batches = [workload.batch(step=0, rank=rank, micro=1) for rank in range(5)]
        assert [batch.rows for batch in batches] == [5, 6, 7, 5, 6]
        if name != "params":
            assert [len(batch.inputs) for batch in batches] == [5, 6, 7, 5, 6]
            assert [len(batch.targets) for batch in batches] == [5, 6, 7, 5, 6]

    def test_last_step_of_an_epoch_is_short(self, make_scenario, name):
        """Half of five rows, rounded down, plus r % 3 as in any other step."""
        data = DataSpec(rows=5, uneven_rows=True, epoch_steps=3)
        workload = build_workload(make_scenario(name, shapes=((3,),), data=data))
        rows = [
            [workload.batch(step=step, rank=rank, micro=0).rows for rank in range(3)]
            for step in range(6)
        ]
        assert rows == [[5, 6, 7], [5, 6, 7], [2, 3, 4]] * 2

    def test_shared_data_have_equal_rows(self, make_scenario, name):
        data = DataSpec(rows=5, uneven_rows=True, ranks="same")
        workload = build_workload(make_scenario(name, shapes=((3,),), data=data))
        one, two = (workload.batch(step=0, rank=rank, micro=0) for rank in (0, 1))
        assert torch.equal(one.inputs, two.inputs)

    def test_infinity_instead_of_a_nan(self, make_scenario, name):
        """It is the first element of rank 1's first micro-batch."""
        data = DataSpec(nan=NanSpec(step=1, rank=1, value="inf"))
        workload = build_workload(make_scenario(name, shapes=((3,),), data=data))
        flat = workload.batch(step=1, rank=1, micro=0).inputs.reshape(-1)
        assert flat[0] == math.inf
        assert flat[1:].isfinite().all()


@pytest.mark.parametrize("name", ["mlp", "params"])
def test_losses_are_multiples_of_the_mean(make_scenario, name):
    """Rank 1 has five rows; a mean divided by two ranks is exact."""
    losses = []
    for loss in ("mean", "sum", "mean-of-ranks"):
        data = DataSpec(rows=4, uneven_rows=True, loss=loss)
        workload = build_workload(make_scenario(name, shapes=((3,),), data=data))
        batch = workload.batch(step=0, rank=1, micro=0)
        losses.append(workload.loss(workload.build(), batch).item())
    mean, total, of_ranks = losses
    assert total == pytest.approx(5 * mean, rel=1e-5)
    assert mean == 2 * of_ranks


def test_uneven_digits_are_distinct(make_scenario):
    """Steps of 2, 3 and 4 rows twice use every image once."""
    scenario = make_scenario(
        "digits",
        data=DataSpec(rows=2, uneven_rows=True),
        world=WorldSpec(size=3),
        run=RunSpec(micro_batches=2),
    )
    workload = build_workload(scenario)
    seen = [
        workload.row_indices(step=step, rank=rank, micro=micro)
        for step in range(3)
        for rank in range(3)
        for micro in range(2)
    ]
    assert [len(rows) for rows in seen] == [2, 2, 3, 3, 4, 4] * 3
    assert len(torch.cat(seen).unique()) == 3 * 18


def test_rows_default_to_the_first_dim():
    inputs = torch.zeros(3, 2)
    assert Batch(inputs=inputs, targets=None).rows == 3
    assert Batch(inputs=inputs, targets=None, row_count=7).rows == 7
