"""Mixture of experts, where each rank builds its share."""

import pytest
import torch

from zero_sim.errors import UsageError
from zero_sim.scenario.spec import ModelSpec, Scenario, TopologySpec
from zero_sim.workloads import build_module, build_workload


def workload_of(ep=2, **model):
    return build_workload(
        Scenario(schema=1, model=ModelSpec(name="moe", **model), topology=TopologySpec(ep=ep))
    )


def named(module):
    return dict(module.named_parameters())


def test_experts_have_global_names_and_other_params_are_on_all_ranks():
    workload = workload_of(ep=2, experts=4)
    first, second = (named(build_module(workload, expert_index=e)) for e in range(2))
    assert first.keys() ^ second.keys() == {
        f"experts.{i}.linear.{kind}" for i in range(4) for kind in ("weight", "bias")
    }
    for name in first.keys() & second.keys():
        assert torch.equal(first[name], second[name])


def test_experts_do_not_depend_on_ep():
    alone = named(workload_of(ep=1).build())
    for ep in (2, 4):
        workload = workload_of(ep=ep)
        shared = {}
        for index in range(ep):
            shared |= named(build_module(workload, expert_index=index))
        assert shared.keys() == alone.keys()
        assert all(torch.equal(shared[name], alone[name]) for name in alone)


def test_experts_differ():
    weights = [p for name, p in named(workload_of(ep=1).build()).items() if "experts" in name]
    assert not any(torch.equal(a, b) for a in weights for b in weights if a is not b)


def test_router_is_always_fp32():
    params = named(workload_of(dtype="bf16").build())
    dtypes = {name: param.dtype for name, param in params.items()}
    assert dtypes.pop("router") == torch.float32
    assert set(dtypes.values()) == {torch.bfloat16}


def test_token_gives_gradients_only_to_its_expert():
    workload = workload_of(ep=2)
    module = build_module(workload, expert_index=1)
    batch = workload.batch(step=0, rank=1, micro=0)
    with torch.no_grad():
        module.router[:, 2] = 0
        module.router[:, 3] = torch.tanh(module.up(batch.inputs[:1]).float())[0]
    workload.loss(
        module, type(batch)(inputs=batch.inputs[:1], targets=batch.targets[:1])
    ).backward()
    grads = {name: param.grad for name, param in named(module).items()}
    assert grads["experts.3.linear.weight"].any()
    assert not grads["experts.2.linear.weight"].any()


def test_default_batch_gives_gradients_to_every_expert():
    workload = workload_of(ep=2)
    for index in range(2):
        module = build_module(workload, expert_index=index)
        workload.loss(module, workload.batch(step=0, rank=index, micro=0)).backward()
        for name, param in named(module).items():
            assert param.grad.count_nonzero() >= 0.25 * param.numel(), name


def test_uneven_experts_per_rank_are_refused():
    with pytest.raises(UsageError, match=r"got 3 for ep=2. Try 4"):
        workload_of(ep=2, experts=3)
