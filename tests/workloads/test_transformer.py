"""The 260-parameter transformer against the walkthrough's numbers."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from zero_sim.workloads import build_workload
from zero_sim.workloads import transformer as walkthrough

FIRST_ELEMENT = {
    "ln1_weight": 0,
    "ln1_bias": 4,
    "W_q": 8,
    "W_k": 24,
    "W_v": 40,
    "W_o": 56,
    "ln2_weight": 72,
    "ln2_bias": 76,
    "W_1": 80,
    "b_1": 144,
    "W_2": 160,
    "b_2": 224,
    "W_vocab": 228,
}


@pytest.fixture
def workload(make_scenario):
    """Return the walkthrough's workload in fp32."""
    return build_workload(make_scenario("transformer-260"))


def test_params_lie_at_the_walkthroughs_offsets(workload):
    """Names, order and sizes give the walkthrough's flat offsets and 260 elements in all."""
    params = dict(workload.build().named_parameters())
    stops = list(accumulate(param.numel() for param in params.values()))
    assert dict(zip(params, [0, *stops[:-1]], strict=True)) == FIRST_ELEMENT
    assert stops[-1] == 260


def test_rank_boundary_cuts_w1_after_its_50th_element():
    """Half of 260 falls inside W_1: 50 elements before it, 14 behind."""
    assert 130 - FIRST_ELEMENT["W_1"] == 50
    assert FIRST_ELEMENT["b_1"] - 130 == 14


def test_query_weight_starts_as_given(workload):
    """W_q[0, 0] is 0.12, rows as printed."""
    assert torch.equal(workload.build().W_q.detach(), torch.tensor(walkthrough.W_Q))


def test_first_input_row_has_mean_0275_and_std_04146(workload):
    """Every batch starts with the walkthrough's row; its deviation is not 0.398."""
    row = workload.batch(step=3, rank=1, micro=0).inputs[0, 0]
    assert torch.equal(row, torch.tensor([0.5, -0.3, 0.8, 0.1]))
    assert row.mean().item() == pytest.approx(0.275)
    assert row.std(correction=0).item() == pytest.approx(0.4146, abs=5e-5)


def test_layer_norm_subtracts_the_mean_and_divides_by_the_deviation():
    """The first row normalised, with identity weights."""
    row = torch.tensor(walkthrough.INPUT_ROW_0)
    out = walkthrough.normalise(row, weight=torch.ones(4), bias=torch.zeros(4))
    expected = (row - 0.275) / 0.4146
    assert torch.allclose(out, expected, atol=2e-4)


def test_weights_multiply_from_the_right():
    """`x @ W_q` for the first unit vector is the first row of W_q."""
    unit = torch.tensor([1.0, 0.0, 0.0, 0.0])
    assert (unit @ torch.tensor(walkthrough.W_Q)).tolist() == pytest.approx(walkthrough.W_Q[0])


def test_attention_mixes_tokens(workload):
    """Changing the last token changes the logits of the first."""
    module, inputs = workload.build(), workload.batch(step=0, rank=0, micro=0).inputs
    changed = inputs.clone()
    changed[:, 2] += 1.0
    assert not torch.equal(module(inputs)[:, 0], module(changed)[:, 0])


def test_gradients_given_average_to_the_mean_given():
    """The walkthrough's two gradients and its mean agree."""
    mean = torch.tensor(walkthrough.W_Q_GRADS, dtype=torch.float64).mean(0)
    assert torch.allclose(mean, torch.tensor(walkthrough.W_Q_GRAD_MEAN, dtype=torch.float64))
