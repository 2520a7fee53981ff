"""The 260-parameter walkthrough on 2 ranks: who owns what, one Adam step on given gradients."""

import pytest
import torch
import torch.distributed as dist

from zero_sim.scenario.spec import ModelSpec, OptimizerSpec, Scenario
from zero_sim.targets import find_target
from zero_sim.workloads import build_workload
from zero_sim.workloads.transformer import W_Q_AFTER_ADAM, W_Q_GRAD_MEAN, W_Q_GRADS

SCENARIO = Scenario(
    schema=1,
    name="walkthrough",
    model=ModelSpec(name="transformer-260", dtype="bf16"),
    optimizer=OptimizerSpec(name="adam", lr=1e-3),
)


@pytest.fixture(scope="module")
def ranks():
    """What each of 2 ranks holds after one step in which only W_q has a gradient."""
    from zero_sim.sim import World

    workload = build_workload(SCENARIO)

    def program(rank):
        engine = find_target("zero_sim").build(
            workload.build(), scenario=SCENARIO, group=dist.group.WORLD
        )
        engine.zero_grad()
        params = dict(engine.module.named_parameters())
        injected = torch.tensor(W_Q_GRADS[rank]).to(torch.bfloat16)
        engine.backward((params["W_q"] * injected).sum(), last_micro=True, rows=1)
        engine.step(lr_factor=1.0)
        parts = {part.place.param: part for part in engine.parts()}
        return engine.params(), parts

    with World(2) as world:
        return world.run(program)


def test_w_q_belongs_to_rank_0_alone(ranks):
    assert "W_q" in ranks[0][1]
    assert "W_q" not in ranks[1][1]


def test_the_mean_gradient(ranks):
    mean = ranks[0][1]["W_q"].grad.float() / 2
    expected = torch.tensor(W_Q_GRAD_MEAN).reshape(-1)
    assert torch.all((mean - expected).abs() <= 2**-8 * torch.tensor(W_Q_GRADS).abs().amax())


def test_w_q_after_the_step_to_three_decimals_on_both_ranks(ranks):
    master = ranks[0][1]["W_q"].master
    start = torch.tensor(build_workload(SCENARIO).build().W_q.detach().float().reshape(-1).tolist())
    expected = torch.tensor(W_Q_AFTER_ADAM).reshape(-1)
    # Adam's first step moves every element by lr against its gradient's sign.
    moved = torch.tensor(W_Q_GRAD_MEAN).reshape(-1).sign() * -1e-3
    assert torch.all((master - start - moved).abs() < 1e-7)
    assert torch.all((expected - (start + moved)).abs() < 2**-9)
    for params, _ in ranks:
        assert torch.equal(params["W_q"].reshape(-1), master.to(torch.bfloat16))
