"""Activation checkpoints: resident memory, and gradients equal to those of one device."""

import pytest
import torch
import torch.distributed as dist

from zero_sim.scenario.spec import ModelSpec, Scenario, TopologySpec, WorldSpec
from zero_sim.workloads import build_workload
from zero_sim.zero.variants.activations import TensorParallel


def workload(tp, dtype="fp32"):
    return build_workload(
        Scenario(
            schema=1,
            model=ModelSpec(name="tp-block", hidden=8, blocks=2, dtype=dtype),
            world=WorldSpec(size=tp),
            topology=TopologySpec(tp=tp),
        )
    )


def grads_of(module, work, look=None):
    loss = work.loss(module, work.batch(step=0, rank=0, micro=0))
    seen = None if look is None else look()
    loss.backward()
    return {name: param.grad for name, param in module.named_parameters()}, seen


@pytest.mark.parametrize("kept", ["none", "whole", "split"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("tp", [2, 4])
def test_gradients_equal_one_device(world_of, kept, dtype, tp):
    work = workload(tp, dtype)
    whole, _ = grads_of(work.build(), work)
    assert any(grad.any() for grad in whole.values())

    def program(rank):
        module = work.build_part(rank)
        module.be_parallel(TensorParallel(dist.group.WORLD, checkpoints=kept))
        grads, _ = grads_of(module, work)
        return [name for name, grad in grads.items() if not torch.equal(grad, whole[name])]

    assert world_of(tp).run(program) == [[]] * tp


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(("kept", "part"), [("whole", 1), ("split", 4)])
def test_checkpoints_stay_resident_until_backward(world_of, kept, part, offload):
    work = workload(4)

    def program(rank):
        module = work.build_part(rank)
        parallel = TensorParallel(dist.group.WORLD, checkpoints=kept, offload=offload)
        module.be_parallel(parallel)
        _, seen = grads_of(
            module, work, lambda: [m.untyped_storage().nbytes() for m in parallel.memory()]
        )
        return seen, list(parallel.memory())

    each = 4 * 4 * 8 * 4 // part  # rows x positions x features x bytes
    assert world_of(4).run(program) == [([each, each], [])] * 4


def test_a_forward_without_gradients_keeps_nothing(world_of):
    work = workload(2)

    def program(rank):
        module = work.build_part(rank)
        parallel = TensorParallel(dist.group.WORLD, checkpoints="split")
        module.be_parallel(parallel)
        with torch.no_grad():
            module(work.batch(step=0, rank=0, micro=0).inputs)
        return list(parallel.memory())

    assert world_of(2).run(program) == [[], []]


def test_parts_combine_to_the_whole_model():
    work = workload(4)
    whole = dict(work.build().named_parameters())
    parts = [dict(work.build_part(index).named_parameters()) for index in range(4)]
    assert {name for part in parts for name in part} == whole.keys()
    for part in parts:
        assert all(torch.equal(param, whole[name]) for name, param in part.items())
