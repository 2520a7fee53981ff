"""Seeds and planted NaNs."""

from __future__ import annotations

import math

import pytest
import torch

from zero_sim.scenario.spec import DataSpec, NanSpec, RunSpec
from zero_sim.workloads import build_workload, seed_of
from zero_sim.workloads.draws import named_seed


def test_seed_differs_in_every_argument(make_scenario):
    zero, one = make_scenario("mlp"), make_scenario("mlp", run=RunSpec(seed=1))
    seeds = {
        seed_of(scenario, step=step, rank=rank, micro=micro)
        for scenario in (zero, one)
        for step in range(3)
        for rank in range(3)
        for micro in range(3)
    }
    assert len(seeds) == 54


def test_seed_fits_manual_seed(make_scenario):
    seed = seed_of(make_scenario("mlp"), step=0, rank=0, micro=0)
    assert torch.Generator().manual_seed(seed).initial_seed() == seed


def test_seed_is_the_same_in_every_process():
    """Seeds do not depend on Python's hash seed; another process printed this value."""
    assert named_seed(7, "data", 1, 2, 3) == 8945149532413841483


def test_seed_ignores_the_rank_if_ranks_share_data(make_scenario):
    """Ranks with the same data have the same randomness in forward."""
    scenario = make_scenario("mlp", data=DataSpec(ranks="same"))
    assert seed_of(scenario, step=0, rank=0, micro=0) == seed_of(scenario, step=0, rank=3, micro=0)


@pytest.mark.parametrize("name", ["mlp", "params", "transformer-260", "digits", "unusual", "fp8"])
@pytest.mark.parametrize("ranks", ["distinct", "same"])
def test_nan_is_planted_at_the_given_step_and_rank(make_scenario, name, ranks):
    """Only the first element of micro-batch 0 of that rank and step is a NaN."""
    data = DataSpec(ranks=ranks, nan=NanSpec(step=1, rank=1))
    workload = build_workload(make_scenario(name, shapes=((0,), (2, 3)), data=data))
    for step in range(3):
        for rank in range(3):
            for micro in range(2):
                flat = workload.batch(step=step, rank=rank, micro=micro).inputs.reshape(-1)
                expected = (step, rank, micro) == (1, 1, 0)
                assert math.isnan(flat[0]) == expected
                assert not flat[1:].isnan().any()


@pytest.mark.parametrize("name", ["mlp", "params", "transformer-260", "digits", "unusual", "fp8"])
def test_nan_is_planted_at_the_given_micro_batch_and_element(make_scenario, name):
    """The index wraps around if the inputs have fewer elements."""

    def flat(micro, *, element):
        nan = NanSpec(step=0, rank=0, micro_batch=1, element=element)
        scenario = make_scenario(name, shapes=((0,), (2, 3)), data=DataSpec(nan=nan))
        batch = build_workload(scenario).batch(step=0, rank=0, micro=micro)
        return batch.inputs.reshape(-1)

    elems = len(flat(1, element=0))
    assert not flat(0, element=5).isnan().any()
    assert flat(1, element=5).isnan().nonzero().tolist() == [[5]]
    assert flat(1, element=elems + 3).isnan().nonzero().tolist() == [[3]]


def test_nan_in_bare_params_stays_in_one_of_them(make_scenario):
    """One shard of the gradient stays finite, so a rank that checks only it misses the NaN."""
    nan = NanSpec(step=0, rank=0, element=7)
    workload = build_workload(make_scenario("params", shapes=((2,), (4,)), data=DataSpec(nan=nan)))
    module = workload.build()
    workload.loss(module, workload.batch(step=0, rank=0, micro=0)).backward()
    first, second = (param.grad for param in module.parameters())
    assert first.isfinite().all() != second.isfinite().all()
