"""Blocks under activation checkpoints."""

import pytest
import torch

from zero_sim.workloads import build_workload, keep_activations

KINDS = ["reentrant", "non-reentrant"]
BLOCKS = {"mlp": "1", "gpt": "layers.1", "moe": "experts.0"}


def grads_of(workload, module):
    workload.loss(module, workload.batch(step=0, rank=0, micro=0)).backward()
    return [param.grad for param in module.parameters()]


def calls_of(module, name):
    calls = []
    module.get_submodule(name).register_forward_pre_hook(lambda *_: calls.append(name))
    return calls


@pytest.mark.parametrize("recompute", KINDS)
@pytest.mark.parametrize("name", [*BLOCKS, "transformer-260"])
def test_recomputed_gradients_equal_those_of_kept_activations(make_scenario, name, recompute):
    workload = build_workload(make_scenario(name, recompute=recompute))
    kept = grads_of(workload, keep_activations(workload.build()))
    assert all(map(torch.equal, grads_of(workload, workload.build()), kept))


@pytest.mark.parametrize("recompute", KINDS)
@pytest.mark.parametrize("name", BLOCKS)
def test_block_runs_again_in_backward(make_scenario, name, recompute):
    workload = build_workload(make_scenario(name, recompute=recompute))
    module = workload.build()
    calls = calls_of(module, BLOCKS[name])
    grads_of(workload, module)
    assert len(calls) == 2


@pytest.mark.parametrize("recompute", KINDS)
def test_block_used_twice_has_no_reentrant_checkpoint(make_scenario, recompute):
    workload = build_workload(make_scenario("gpt", recompute=recompute))
    module = workload.build()
    calls = calls_of(module, "layers.0")
    grads_of(workload, module)
    assert len(calls) == {"reentrant": 2, "non-reentrant": 4}[recompute]


def test_no_grad_keeps_no_graph(make_scenario):
    workload = build_workload(make_scenario("mlp", recompute="reentrant"))
    with torch.no_grad():
        loss = workload.loss(workload.build(), workload.batch(step=0, rank=0, micro=0))
    assert not loss.requires_grad
