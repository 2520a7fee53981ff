"""The 260-parameter transformer against the walkthrough's numbers."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from tests.layout.test_walkthrough import FIRST_AND_LAST
from zero_sim.workloads import build_workload
from zero_sim.workloads import transformer as walkthrough


@pytest.fixture
def workload(make_scenario):
    return build_workload(make_scenario("transformer-260"))


def test_params_have_the_offsets_of_the_walkthrough(workload):
    """Names, order and sizes give the walkthrough's flat offsets."""
    params = dict(workload.build().named_parameters())
    stops = accumulate(param.numel() for param in params.values())
    last = {name.replace(".", "_"): last for name, (_, last) in FIRST_AND_LAST.items()}
    assert dict(zip(params, (stop - 1 for stop in stops), strict=True)) == last


def test_initial_weights_are_those_of_the_walkthrough(workload):
    params = dict(workload.build().named_parameters())
    for name, values in walkthrough.GIVEN.items():
        assert torch.equal(params[name].detach(), torch.tensor(values))


def test_first_batch_of_rank_0_starts_with_the_given_tokens(workload):
    batch = workload.batch(step=0, rank=0, micro=0)
    assert torch.equal(batch.inputs[0], torch.tensor(walkthrough.INPUT))
    assert not torch.equal(batch.inputs[1], batch.inputs[0])


@pytest.mark.parametrize("place", [(1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_all_other_batches_are_drawn(workload, place):
    step, rank, micro = place
    batch = workload.batch(step=step, rank=rank, micro=micro)
    assert not torch.isin(batch.inputs, torch.tensor(walkthrough.INPUT)).any()


def test_first_input_row_has_mean_0275_and_std_04146():
    """The deviation is not 0.398."""
    row = torch.tensor(walkthrough.INPUT[0])
    assert row.mean().item() == pytest.approx(0.275)
    assert row.std(correction=0).item() == pytest.approx(0.4146, abs=5e-5)


def test_activations_are_recorded(workload):
    module, noted = workload.build(), {}
    inputs = workload.batch(step=0, rank=0, micro=0).inputs
    unnoted = module(inputs)

    def note(name, activation):
        noted[name] = activation
        return activation

    module.note = note
    assert torch.equal(module(inputs), unnoted)
    assert torch.equal(noted["logits"], unnoted)
    assert noted["softmax"].shape == (4, 2, 3, 3)


def test_layer_norm_subtracts_the_mean_and_divides_by_the_deviation():
    """The first row, normalized with identity weights."""
    row = torch.tensor(walkthrough.INPUT[0])
    out = walkthrough.normalise(row, weight=torch.ones(4), bias=torch.zeros(4))
    expected = (row - 0.275) / 0.4146
    assert torch.allclose(out, expected, atol=2e-4)


def test_attention_mixes_tokens(workload):
    module, inputs = workload.build(), workload.batch(step=0, rank=0, micro=0).inputs
    changed = inputs.clone()
    changed[:, 2] += 1.0
    assert not torch.equal(module(inputs)[:, 0], module(changed)[:, 0])


def test_given_gradients_have_the_given_mean():
    mean = torch.tensor(walkthrough.W_Q_GRADS, dtype=torch.float64).mean(0)
    assert torch.allclose(mean, torch.tensor(walkthrough.W_Q_GRAD_MEAN, dtype=torch.float64))
