"""Contract of every workload."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from zero_sim.scenario.spec import DataSpec, ModelName, RunSpec
from zero_sim.workloads import build_workload, registry
from zero_sim.workloads.draws import working_dtype

PLAIN = ["mlp", "params", "transformer-260", "digits", "positional", "gpt", "multi-token"]
NAMES = [*PLAIN, "unusual", "moe", "fp8", "bit-hash", "ternary"]
SHAPES = ((3, 2), (), (0, 4), (5,))


def test_every_model_is_registered():
    """The registry has exactly the names of scenarios."""
    assert registry._WORKLOADS.keys() == set(get_args(ModelName))


def bits_of(module):
    return [param.detach().clone() for param in module.parameters()]


@pytest.mark.parametrize("name", NAMES)
class TestEveryWorkload:
    """Claims about every workload."""

    def test_builds_the_same_bits_each_time(self, make_scenario, name):
        """Two builds, and two workloads of one scenario, agree bit for bit."""
        scenario = make_scenario(name, shapes=SHAPES)
        one, two = build_workload(scenario), build_workload(scenario)
        for left, right, other in zip(
            bits_of(one.build()), bits_of(one.build()), bits_of(two.build()), strict=True
        ):
            assert torch.equal(left, right)
            assert torch.equal(left, other)

    def test_builds_share_no_memory(self, make_scenario, name):
        workload = build_workload(make_scenario(name, shapes=SHAPES))
        before = bits_of(workload.build())
        with torch.no_grad():
            for param in workload.build().parameters():
                param.fill_(7.0)
        for left, right in zip(before, bits_of(workload.build()), strict=True):
            assert torch.equal(left, right)

    def test_uses_no_global_random_number(self, make_scenario, name):
        before = torch.random.get_rng_state()
        workload = build_workload(make_scenario(name, shapes=SHAPES))
        workload.build()
        workload.batch(step=0, rank=0, micro=0)
        assert torch.equal(torch.random.get_rng_state(), before)

    def test_batch_is_a_pure_function(self, make_scenario, name):
        """Equal arguments give equal bits, even after other calls and in-place changes."""
        workload = build_workload(make_scenario(name, shapes=SHAPES, run=RunSpec(micro_batches=2)))
        first = workload.batch(step=2, rank=1, micro=0)
        inputs = first.inputs.clone()
        first.inputs.fill_(7.0)
        workload.batch(step=90, rank=0, micro=1)
        assert torch.equal(workload.batch(step=2, rank=1, micro=0).inputs, inputs)

    def test_ranks_have_distinct_data(self, make_scenario, name):
        workload = build_workload(make_scenario(name, shapes=SHAPES, run=RunSpec(micro_batches=2)))
        base = workload.batch(step=0, rank=0, micro=0).inputs
        for step, rank, micro in [(1, 0, 0), (0, 1, 0), (0, 0, 1)]:
            assert not torch.equal(workload.batch(step=step, rank=rank, micro=micro).inputs, base)

    def test_ranks_have_the_same_data_on_request(self, make_scenario, name):
        workload = build_workload(make_scenario(name, shapes=SHAPES, data=DataSpec(ranks="same")))
        zero, one = (workload.batch(step=0, rank=rank, micro=0) for rank in (0, 1))
        assert torch.equal(zero.inputs, one.inputs)

    def test_only_the_digits_have_an_accuracy(self, make_scenario, name):
        """Other models have no held-out data."""
        workload = build_workload(make_scenario(name, shapes=SHAPES))
        accuracy = workload.accuracy(workload.build())
        assert (accuracy is not None) == (name == "digits")


@pytest.mark.parametrize("name", PLAIN)
class TestEveryPlainWorkload:
    """Claims about workloads that train and use every param."""

    @pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
    def test_every_param_gets_a_gradient_in_its_dtype(self, make_scenario, name, dtype):
        """The loss is a finite scalar that reaches each param and a quarter of all elements."""
        workload = build_workload(make_scenario(name, shapes=SHAPES, dtype=dtype))
        module = workload.build()
        loss = workload.loss(module, workload.batch(step=0, rank=0, micro=0))
        loss.backward()
        assert loss.shape == ()
        assert loss.isfinite()
        grads = [param.grad for param in module.parameters()]
        assert {grad.dtype for grad in grads} == {working_dtype(dtype)}
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        assert flat.count_nonzero() >= 0.25 * flat.numel()

    def test_gradient_depends_on_the_weights(self, make_scenario, name):
        workload = build_workload(make_scenario(name, shapes=SHAPES))
        batch = workload.batch(step=0, rank=0, micro=0)
        flats = []
        for shift in (0.0, 0.125):
            module = workload.build()
            with torch.no_grad():
                for param in module.parameters():
                    param.add_(shift)
            workload.loss(module, batch).backward()
            flats.append(torch.cat([param.grad.reshape(-1) for param in module.parameters()]))
        assert not torch.equal(*flats)
