"""Whole-param optimizers over shards: gathers, and refusals."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from zero_sim import run_case
from zero_sim.calculators.measure import measure
from zero_sim.errors import UsageError
from zero_sim.scenario.rules import check_scenario
from zero_sim.scenario.spec import (
    ModelSpec,
    OptimizerSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    WorldSpec,
)
from zero_sim.zero.refusals import check_optimizer
from zero_sim.zero.variants.whole_params import Lamb, Muon

CASE = Scenario(
    schema=1,
    model=ModelSpec(name="params", shapes=((3, 5), (7,), (1,), (4, 2))),
    world=WorldSpec(size=4),
    optimizer=OptimizerSpec(name="muon", momentum=0.9, lr=0.01),
    run=RunSpec(steps=2),
)


def gathers_in_fp32(name, **system):
    """Count rank 0's fp32 gathers in a step by kind and elements; params are in bf16."""
    case = replace(
        CASE,
        model=replace(CASE.model, dtype="bf16"),
        optimizer=OptimizerSpec(name=name, lr=0.01),
        system=SystemSpec(**system),
    )
    measured = measure(case)
    assert not list(measured.differences())
    return Counter(
        (record.kind, record.elems) for record in measured.records[0] if record.dtype == "float32"
    )


def test_muon_gathers_each_bucket_once_and_lamb_twice():
    assert gathers_in_fp32("muon", stage=1) == {("all_gather", 8): 1}
    assert gathers_in_fp32("lamb", stage=1) == {("all_gather", 8): 2}
    assert gathers_in_fp32("lamb", stage=2, bucket_elems=15) == {
        ("all_gather", 4): 4,
    }


@pytest.mark.parametrize(
    "system", [{"stage": 0}, {"stage": 1, "bucket_elems": 1, "partition": "one-owner"}]
)
def test_nothing_is_gathered_if_one_rank_has_the_full_param(system):
    assert gathers_in_fp32("lamb", **system) == {}


@pytest.mark.parametrize("redundancy", [1, 2, 4])
def test_redundancy_passes(redundancy):
    system = SystemSpec(stage=3, bucket_elems=15, redundancy=redundancy)
    result = run_case(replace(CASE, system=system))
    assert result.verdict == "pass", result.findings


@pytest.mark.parametrize("target", ["torch-ddp", "torch-zero-redundancy"])
@pytest.mark.parametrize("name", ["muon", "lamb"])
def test_torch_targets_with_whole_params_pass(target, name):
    stage = 0 if target == "torch-ddp" else 1
    case = replace(
        CASE,
        system=SystemSpec(target=target, stage=stage),
        optimizer=OptimizerSpec(name=name, lr=0.01),
    )
    result = run_case(case)
    assert result.verdict == "pass", result.findings


def test_row_shards_refuse_whole_param_optimizers():
    result = run_case(replace(CASE, system=SystemSpec(target="torch-fsdp2", stage=1)))
    assert result.verdict == "error"
    assert "optimizer.name" in str(result.error)


def test_unknown_order_refuses_whole_param_optimizers():
    world = replace(CASE.world, order="ring", order_known=False)
    (problem,) = check_scenario(replace(CASE, world=world))
    assert "needs whole params" in problem.message


def test_foreach_is_refused():
    optimizer = replace(CASE.optimizer, foreach=True)
    (problem,) = check_scenario(replace(CASE, optimizer=optimizer))
    assert problem.path == "optimizer.foreach"


def test_torch_muon_is_refused_with_a_remedy():
    """torch's Muon does not know shards, and would orthogonalize each of them separately."""
    inner = torch.optim.Muon([nn.Parameter(torch.zeros(2, 2))])
    with pytest.raises(UsageError, match="an optimizer with attach"):
        check_optimizer(inner, declared=True)


@pytest.mark.parametrize("cls", [Muon, Lamb])
def test_own_whole_param_optimizers_are_accepted(cls):
    check_optimizer(cls([nn.Parameter(torch.zeros(2, 2))]), declared=False)
