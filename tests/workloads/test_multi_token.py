"""Language model with a second loss, and systems that scale it."""

from itertools import islice

import pytest
import torch
from torch.nn import functional

from tests.judge.ruled import Target
from zero_sim.fuzz.drawing import draws
from zero_sim.fuzz.strategies import drawn_cases
from zero_sim.rules.judging import run_case
from zero_sim.scenario.spec import ModelSpec, RunSpec, Scenario, SystemSpec, TopologySpec, WorldSpec
from zero_sim.targets import Numerics
from zero_sim.workloads import build_workload, loss_terms
from zero_sim.workloads.multi_token import SECOND_WEIGHT


@pytest.fixture
def workload(make_scenario):
    return build_workload(make_scenario("multi-token", hidden=2))


def test_terms_are_weighted_cross_entropies_of_the_next_two_tokens(workload):
    module, batch = workload.build(), workload.batch(step=0, rank=0, micro=0)
    terms = loss_terms(workload, module, batch)
    factors = (1, SECOND_WEIGHT)
    for term, factor, logits, targets, weights in zip(
        terms, factors, module(batch.inputs), batch.targets, batch.extra[0], strict=True
    ):
        losses = functional.cross_entropy(logits.mT, targets, reduction="none")
        torch.testing.assert_close(term, (losses * weights).mean() * factor)


def test_second_loss_alone_reaches_the_further_layer(workload):
    module = workload.build()
    main, second = loss_terms(workload, module, workload.batch(step=0, rank=0, micro=0))
    weight = module.further.weight
    of_main, of_second = (
        torch.autograd.grad(term, weight, retain_graph=True)[0] for term in (main, second)
    )
    assert of_second.any()
    assert not of_main.any()


def test_loss_is_the_sum_of_both(workload):
    module, batch = workload.build(), workload.batch(step=0, rank=0, micro=0)
    main, second = loss_terms(workload, module, batch)
    assert torch.equal(workload.loss(module, batch), main + second)


@pytest.mark.parametrize("stage", [0, 3])
def test_own_system_passes(stage):
    case = Scenario(
        schema=1,
        model=ModelSpec(name="multi-token", hidden=2),
        world=WorldSpec(size=4),
        topology=TopologySpec(cp=2),
        system=SystemSpec(stage=stage, bucket_elems=8),
        run=RunSpec(steps=2),
    )
    result = run_case(case)
    assert result.verdict == "pass", result.findings


def split_over_cp(does, numerics=None, *, count=10):
    """Return a target that takes both terms, and drawn cases for it with a cp above 1."""
    target = Target(does, numerics, models=("multi-token",))
    cases = draws(drawn_cases(target, ranks_max=4), seed="second loss")
    return target, list(islice((case for case in cases if case.topology.cp > 1), count))


def over_cp(engine):
    return 1 / engine.cp


def test_unscaled_second_loss_passes():
    target, cases = split_over_cp({})
    assert {run_case(case, target=target).verdict for case in cases} == {"pass"}


def test_second_loss_divided_twice_by_cp_fails():
    # Only a few, because each failure is explained.
    target, cases = split_over_cp({"second": over_cp}, count=3)
    assert {run_case(case, target=target).verdict for case in cases} == {"fail"}


def test_declared_division_of_the_second_loss_by_cp_passes():
    target, cases = split_over_cp({"second": over_cp}, Numerics(scale_second="1/cp"))
    assert {run_case(case, target=target).verdict for case in cases} == {"pass"}
