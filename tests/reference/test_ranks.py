"""Ranks that both references replay."""

from __future__ import annotations

import pytest
import torch

from zero_sim.errors import ScenarioError
from zero_sim.reference.placement import MemoryLayout
from zero_sim.reference.ranks import Adding, Ranks
from zero_sim.reference.replay import isolated
from zero_sim.reference.rules import Rules
from zero_sim.scenario.spec import (
    DataSpec,
    FreezeSpec,
    ModelSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    WorldSpec,
)
from zero_sim.workloads import build_workload

LINEAR = Adding(order="linear")


def case(**changed):
    model = ModelSpec(**{"name": "mlp", "hidden": 3} | changed.pop("model", {}))
    changed.setdefault("world", WorldSpec(size=3))
    return Scenario(schema=1, model=model, **changed)


def ranks_of(scenario, rules=None):
    return Ranks(scenario, workload=build_workload(scenario), rules=rules)


def contributions(ranks, step=0):
    with isolated():
        return ranks.replay(step, scale=None)


def test_every_rank_has_a_loss_per_micro_batch():
    local = contributions(ranks_of(case(run=RunSpec(micro_batches=2))))
    assert local.losses.keys() == {(rank, micro) for rank in range(3) for micro in range(2)}


def test_sum_is_over_all_ranks():
    local = contributions(ranks_of(case(system=SystemSpec(divide="none"))))
    grads = local.reduce(LINEAR, orders={})
    for name, grad in grads.items():
        first, second, third = (each.rounds[0][name] for each in local.replays)
        assert torch.equal(grad, first + second + third)


@pytest.mark.parametrize("scale", [None, 4.0])
def test_losses_are_scaled_by_the_rows_of_all_ranks(scale):
    """5 ranks, two with a single micro-batch: 1 + 2 + 3 + 1 + 2 rows, of 3 ranks twice."""
    run = RunSpec(micro_batches=2, own_micro_batches=(2, 1))
    data = DataSpec(rows=1, uneven_rows=True, loss="sum")
    scenario = case(world=WorldSpec(size=5), run=run, data=data)
    seen = []

    def noted(at):
        seen.append((at.rows, at.rank_rows, at.step_rows, at.micro_batches, at.world_size))
        return 0.5

    plain = ranks_of(scenario)
    halved = ranks_of(scenario, Rules(scale_loss=noted))
    with isolated():
        whole, half = (each.replay(0, scale=scale).replays for each in (plain, halved))
    rows = [(1, 2), (1, 2), (2, 2), (3, 6), (3, 6), (1, 1), (2, 4), (2, 4)]
    assert seen == [(*each, 15, 2, 5) for each in rows]
    for name, grad in half[0].rounds[0].items():
        assert torch.equal(grad, whole[0].rounds[0][name] * 0.5)
    assert torch.equal(half[0].losses[0], whole[0].losses[0])


def test_second_loss_factor_does_not_scale_the_main_loss():
    """With a factor of 0, only the layer of the second loss has no gradient."""
    scenario = case(model={"name": "multi-token"})
    with isolated():
        rules = Rules(scale_second=lambda at: 0.0)
        replay = ranks_of(scenario, rules).replay(0, scale=4.0).replays[0]
    assert replay.has_second_loss
    assert not replay.rounds[0]["further.weight"].any()
    assert replay.rounds[0]["trunk.weight"].any()


def test_frozen_params_sum_to_zeros():
    name = next(iter(ranks_of(case()).params()))
    spans = (FreezeSpec(param=name, start=0, stop=1),)
    local = contributions(ranks_of(case(model={"freeze": spans})))
    assert name not in local.active
    assert not local.reduce(LINEAR, orders={})[name].any()


def test_freezing_an_unknown_param_is_refused():
    spans = (FreezeSpec(param="nobody", start=0, stop=1),)
    with pytest.raises(ScenarioError, match="'nobody'"):
        ranks_of(case(model={"freeze": spans}))


def test_values_are_cast_into_the_params_of_all_ranks():
    ranks = ranks_of(case(model={"dtype": "bf16"}))
    like = ranks.params()
    places = [
        {name: MemoryLayout(64 * (rank + 1), param.stride()) for name, param in like.items()}
        for rank in range(3)
    ]
    ranks.set_addresses(places)
    ranks.write({name: torch.full(param.shape, 1 / 3) for name, param in like.items()}, scales={})
    third = torch.tensor(1 / 3).to(torch.bfloat16)
    assert all(bool((param == third).all()) for param in ranks.params().values())
