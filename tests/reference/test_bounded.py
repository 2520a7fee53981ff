"""Reference without a known order: its bounds contain the sums of every order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from zero_sim.reference import BoundedReference, Reference
from zero_sim.scenario.spec import (
    DataSpec,
    LossScaleSpec,
    ModelSpec,
    NanSpec,
    OptimizerSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    WorldSpec,
)
from zero_sim.workloads import build_workload

CASE = Scenario(
    schema=1,
    model=ModelSpec(name="mlp", dtype="bf16", hidden=5),
    world=WorldSpec(size=6),
    run=RunSpec(micro_batches=2),
)


def bounded(case=CASE):
    return BoundedReference(case, workload=build_workload(case))


def known(case=CASE):
    return Reference(case, workload=build_workload(case))


@pytest.mark.parametrize("order", ["linear", "linear-fp32", "tree"])
@pytest.mark.parametrize(
    "system",
    [
        SystemSpec(),
        SystemSpec(redundancy=2),
        SystemSpec(divide="premul"),
        SystemSpec(sync="every"),
        SystemSpec(grad_dtype="fp32"),
    ],
    ids=["plain", "copies", "premul", "every", "fp32"],
)
def test_every_order_is_within_the_bounds(system, order):
    case = replace(CASE, system=system)
    taken = bounded(case).replay_step()
    step = known(replace(case, world=replace(case.world, order=order))).step()
    for name, grad in step.grads.items():
        assert taken.bounds[name].holds(grad).all()
    assert taken.norm_min <= step.norm <= taken.norm
    assert taken.zeros_min <= step.measured.zeros <= taken.zeros
    assert taken.losses.keys() == step.losses.keys()


def test_bounds_are_narrow():
    """1.5 times a gradient is outside almost everywhere, except near zero."""
    taken = bounded().replay_step()
    kept = [taken.bounds[name].holds(grad * 1.5) for name, grad in taken.grads.items()]
    assert torch.cat([mask.reshape(-1) for mask in kept]).float().mean() < 0.05


def test_replay_uses_the_adopted_params():
    reference, steps = bounded(), known()
    first = steps.step()
    reference.replay_step()
    shown = {name: param.clone() for name, param in first.params.items()}
    reference.adopt(shown)
    second, taken = steps.step(), reference.replay_step()
    assert taken.step == 1
    for key, loss in second.losses.items():
        assert torch.equal(loss, taken.losses[key])


def test_overflow_shrinks_the_scale_and_skips():
    case = replace(
        CASE,
        data=DataSpec(nan=NanSpec(step=0, rank=1)),
        optimizer=OptimizerSpec(loss_scale=LossScaleSpec(initial=8.0)),
    )
    reference = bounded(case)
    first, second = reference.replay_step(), reference.replay_step()
    assert (first.overflow, first.skipped, first.loss_scale) == ("certain", True, 8.0)
    assert (second.overflow, second.skipped, second.loss_scale) == ("never", False, 4.0)


def test_two_terms_have_one_sum():
    case = replace(CASE, world=WorldSpec(size=4), system=SystemSpec(redundancy=2))
    taken = bounded(case).replay_step()
    for name, grad in taken.grads.items():
        assert torch.equal(taken.bounds[name].low, grad.double())
        assert torch.equal(taken.bounds[name].high, grad.double())
