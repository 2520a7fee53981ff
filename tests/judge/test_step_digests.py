"""Digests of a step: equal for equal values, and unchanged by JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from zero_sim.judge.facts import Facts
from zero_sim.judge.judged_group import JudgedGroup
from zero_sim.judge.ownership import Ownership
from zero_sim.judge.step_digests import StepDigests, digest_of, digests_of, key_of
from zero_sim.reference import Reference, memory_layout_of
from zero_sim.scenario.spec import (
    DataSpec,
    ExpectSpec,
    LossScaleSpec,
    ModelSpec,
    NanSpec,
    OptimizerSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    WorldSpec,
)
from zero_sim.targets import Numerics, Place
from zero_sim.workloads import build_workload

CASE = Scenario(
    schema=1,
    model=ModelSpec(name="mlp", hidden=3),
    world=WorldSpec(size=2),
    system=SystemSpec(stage=0),
    optimizer=OptimizerSpec(name="adamw"),
    run=RunSpec(steps=2),
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def taken(case=CASE, **options):
    """Return a step and its group, in which every rank owns all of each param."""
    workload = build_workload(case)
    reference = Reference(case, workload=workload)
    ownership = Ownership(case, held=reference.held)
    params = dict(workload.build().named_parameters())
    facts = Facts(
        places=tuple(
            Place(param=name, start=0, stop=each.numel()) for name, each in params.items()
        ),
        addresses={name: memory_layout_of(each) for name, each in params.items()},
        shapes={name: tuple(each.shape) for name, each in params.items()},
    )
    for rank in range(case.world.size):
        ownership.note_facts(rank, facts)
    group = JudgedGroup(
        scenario=case,
        numerics=Numerics(**options),
        ownership=ownership,
        world_ranks=range(case.world.size),
        first_step=0,
        sees_all=False,
    )
    return reference.step(), group


def sent(digests):
    return StepDigests(**json.loads(json.dumps(digests.as_dict())))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_signed_zeros_have_one_digest(dtype):
    plus, minus = (torch.tensor([zero, 1.0], dtype=dtype) for zero in (0.0, -0.0))
    assert digest_of(plus) == digest_of(minus)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("elems", [1, 1 << 15, (1 << 15) + 1, 3 << 15])
def test_last_element_changes_the_digest(dtype, elems):
    before = torch.zeros(elems, dtype=dtype)
    after = before.clone()
    after[-1] = torch.finfo(dtype).smallest_normal
    assert digest_of(before) != digest_of(after)


def test_subnormal_number_is_not_zero():
    assert digest_of(torch.tensor([1e-45])) != digest_of(torch.tensor([0.0]))


def test_digest_depends_on_dtype_and_number_of_elements():
    zeros = [torch.zeros(2), torch.zeros(3), torch.zeros(2, dtype=torch.int32), torch.zeros(0)]
    assert len({digest_of(each) for each in zeros}) == len(zeros)


def test_digest_ignores_shape_and_strides():
    square = torch.arange(4.0).reshape(2, 2)
    assert digest_of(square) == digest_of(torch.arange(4.0))
    assert digest_of(square.t()) == digest_of(torch.tensor([0.0, 2.0, 1.0, 3.0]))


def test_fp8_is_hashed_by_its_bytes():
    one, other = (torch.tensor(x).to(torch.float8_e4m3fn) for x in ([1.0, 2.0], [2.0, 1.0]))
    assert digest_of(one) != digest_of(other)


def test_digests_of_a_step_survive_json():
    step, group = taken()
    digests = digests_of(step, group=group)
    assert sent(digests) == digests
    assert digests.norm == step.norm.item()
    assert all(digests.agrees(loss, "loss", *at) for at, loss in step.losses.items())


def test_digests_contain_all_tensors_by_owned_span():
    step, group = taken()
    digests = digests_of(step, group=group)
    for name, master in step.masters.items():
        span = name, 0, master.numel()
        assert digests.agrees(master, "master", *span)
        assert digests.agrees(step.grads[name], "grad", *span)
        assert {*digests.state_keys[name]} == step.state[name].keys() >= {"exp_avg", "step"}
        assert all(
            digests.agrees(each, "state", *span, key) for key, each in step.state[name].items()
        )
        assert digests.agrees(step.params[name], "param", name)
    assert not any(key.startswith("whole grad") for key in digests.digests)


def test_unsharded_gradients_have_digests_if_declared():
    step, group = taken(grads_in_params=True)
    digests = digests_of(step, group=group)
    assert all(digests.agrees(grad, "whole grad", name) for name, grad in step.grads.items())


def test_unknown_param_has_no_digest():
    step, group = taken()
    group.ownership.places[0].append(Place(param="nobody's", start=0, stop=3))
    digests = digests_of(step, group=group)
    assert key_of("master", "nobody's", 0, 3) not in digests.digests


@pytest.mark.parametrize(
    "parts",
    [
        {"expect": ExpectSpec(one_device=True)},
        {
            "data": DataSpec(nan=NanSpec(step=0, rank=1, value="inf")),
            "optimizer": OptimizerSpec(loss_scale=LossScaleSpec()),
        },
    ],
    ids=["one device", "an overflow"],
)
def test_some_steps_have_no_digests(parts):
    step, group = taken(replace(CASE, **parts))
    assert digests_of(step, group=group) is None
