"""Tied params under torch's own systems: one unit, two names of one param, equal bits."""

import pytest
import torch
from torch import nn

from zero_sim import run_case
from zero_sim.scenario.spec import (
    ModelSpec,
    OptimizerSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    WorldSpec,
)
from zero_sim.targets import find_target, refusals
from zero_sim.targets.torch.wrapping import called_children, widen_params


def case(target, stage, *, dtype="fp32", size=2, micro_batches=2):
    return Scenario(
        schema=1,
        name="tied",
        model=ModelSpec(name="params", dtype=dtype, shapes=((5,), (2, 3)), tied=("p1", "p0")),
        world=WorldSpec(size=size),
        system=SystemSpec(target=target, stage=stage),
        optimizer=OptimizerSpec(clip_norm=1e-3),
        run=RunSpec(steps=2, micro_batches=micro_batches),
    )


@pytest.mark.parametrize(
    ("target", "stage", "dtype"),
    [
        ("single-device", 0, "fp32"),
        ("torch-ddp", 0, "fp32"),
        ("torch-zero-redundancy", 1, "fp32"),
        ("torch-fsdp1", 3, "fp32"),
        ("torch-fsdp1", 3, "bf16"),
        ("torch-fsdp2", 1, "fp32"),
        ("torch-fsdp2", 3, "bf16"),
    ],
)
def test_tied_param_equals_the_reference(target, stage, dtype):
    result = run_case(case(target, stage, dtype=dtype, size=1 if target == "single-device" else 2))
    assert (result.verdict, result.findings, result.error) == ("pass", (), "")


@pytest.mark.parametrize(
    ("parts", "paths"),
    [
        ({"dtype": "bf16", "stage": 0}, ["model.tied"]),
        ({"dtype": "bf16", "stage": 3, "size": 1}, ["model.tied"]),
        ({"dtype": "bf16", "stage": 0, "micro_batches": 1}, []),
        ({"dtype": "bf16", "stage": 3}, []),
        ({"dtype": "fp32", "stage": 0}, []),
    ],
    ids=str,
)
def test_fsdp1_refuses_accumulation_of_unsharded_16_bit_tied_gradients(parts, paths):
    target = find_target("torch-fsdp1")
    found = refusals(target, case("torch-fsdp1", **parts))
    assert [problem.path for problem in found] == paths
    assert not refusals(find_target("torch-fsdp1-as-is"), case("torch-fsdp1", **parts))


class Tied(nn.Module):
    """Two layers: one reuses the weight of the root module, one shares nothing."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
        self.apart = nn.Linear(2, 2)
        self.again = nn.Linear(2, 2, bias=False)
        self.again.weight = self.weight


def test_child_that_shares_a_param_stays_with_its_root():
    assert [name for name, _ in called_children(Tied())] == ["apart"]


def test_widened_params_stay_tied():
    module = Tied()
    widen_params(module)
    assert module.again.weight is module.weight
    assert {param.dtype for param in module.parameters()} == {torch.float32}
