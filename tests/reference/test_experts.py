"""Experts, which only some ranks have, in the oracle."""

import pytest
import torch
from torch import nn

from zero_sim.reference import Reference
from zero_sim.scenario.spec import (
    FreezeSpec,
    ModelSpec,
    OptimizerSpec,
    Scenario,
    SystemSpec,
    TopologySpec,
    WorldSpec,
)
from zero_sim.workloads import Batch


class Pair(nn.Module):
    """`dense`, and the expert of one index."""

    def __init__(self, index):
        super().__init__()
        self.dense = nn.Parameter(torch.ones(1))
        self.register_parameter(f"expert{index}", nn.Parameter(torch.ones(1)))

    def forward(self, factor):
        return sum((param * factor).sum() for param in self.parameters())


class Dealt:
    """Workload in which rank r's gradient is `grads[r]` for each of its params."""

    def __init__(self, grads):
        self.grads = grads

    def build(self):
        return self.build_share(0)

    def build_share(self, expert_index):
        return Pair(expert_index)

    def batch(self, *, step, rank, micro):
        return Batch(inputs=torch.tensor([self.grads[rank]]), targets=None)

    def loss(self, module, batch):
        return module(batch.inputs)

    def accuracy(self, module):
        return None


def scenario_of(size=4, ep=2, *, freeze=(), optim=None, **system):
    return Scenario(
        schema=1,
        model=ModelSpec(name="moe", freeze=freeze),
        world=WorldSpec(size=size),
        topology=TopologySpec(ep=ep),
        system=SystemSpec(**{"divide": "none", **system}),
        optimizer=optim or OptimizerSpec(name="sgd", lr=1.0),
    )


def values(tensors):
    return {name: tensor.item() for name, tensor in tensors.items()}


@pytest.mark.parametrize("system", [{}, {"redundancy": 2}, {"stage": 0}])
def test_params_are_summed_over_the_ranks_that_have_them(system):
    reference = Reference(scenario_of(**system), workload=Dealt([1.0, 2.0, 4.0, 8.0]))
    assert values(reference.step().grads) == {"dense": 15.0, "expert0": 5.0, "expert1": 10.0}


def test_sums_are_divided_by_the_number_of_all_ranks():
    reference = Reference(scenario_of(divide="post"), workload=Dealt([1.0, 2.0, 4.0, 8.0]))
    masters = values(reference.step().masters)
    assert masters == {"dense": 1 - 15 / 4, "expert0": 1 - 5 / 4, "expert1": 1 - 10 / 4}


def test_norm_counts_each_param_once():
    reference = Reference(scenario_of(), workload=Dealt([1.0, 2.0, 4.0, 8.0]))
    assert reference.step().norm.item() == pytest.approx((15**2 + 5**2 + 10**2) ** 0.5)


def test_reference_lists_params_by_rank():
    reference = Reference(scenario_of(), workload=Dealt([0.0] * 4))
    even, odd = {"dense", "expert0"}, {"dense", "expert1"}
    assert reference.held == [even, odd, even, odd]


def test_frozen_expert_keeps_its_value():
    freeze = (FreezeSpec(param="expert1", start=0, stop=1),)
    reference = Reference(scenario_of(freeze=freeze), workload=Dealt([1.0, 2.0, 4.0, 8.0]))
    step = reference.step()
    assert (step.grads["expert1"].item(), step.masters["expert1"].item()) == (0.0, 1.0)


def test_continuing_with_another_ep_keeps_every_expert():
    """The real mixture of experts goes from ep=4 to ep=1; the masters are kept."""
    case = Scenario(
        schema=1,
        model=ModelSpec(name="moe", dtype="bf16"),
        world=WorldSpec(size=4),
        topology=TopologySpec(ep=4),
    )
    from dataclasses import replace

    from zero_sim.workloads import build_workload

    reference = Reference(case, workload=build_workload(case))
    before = {name: value.clone() for name, value in reference.step().masters.items()}
    reference.continue_as(replace(case, topology=TopologySpec(ep=1), world=WorldSpec(size=1)))
    (held,) = reference.held
    assert held == before.keys()
    after = reference.step()
    assert after.masters.keys() == before.keys()
    assert after.state["experts.3.linear.bias"]["step"].item() == 2
