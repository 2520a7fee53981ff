"""Follower: steps of a part of a param, with the bits of a full step."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from zero_sim.reference.division import Division
from zero_sim.reference.following import Follower, Update
from zero_sim.reference.gradient import measure
from zero_sim.reference.stepping import Stepper
from zero_sim.scenario.kinds import WHOLE_PARAM_OPTIMIZERS
from zero_sim.scenario.spec import OptimizerName, OptimizerSpec, ParamGroupSpec

PLAIN = Update(division=Division(how="post", count=3), scale=None, lr_factor=1.0)


def drawn(seed, dtype=torch.float32):
    return torch.randn(301, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(
    "name", [n for n in get_args(OptimizerName) if n not in (*WHOLE_PARAM_OPTIMIZERS, "own")]
)
@pytest.mark.parametrize(("start", "stop"), [(0, 301), (1, 8), (37, 300)])
def test_part_has_the_bits_of_the_full_step(name, start, stop):
    spec = OptimizerSpec(name=name, lr=0.01)
    whole = Stepper(spec, params={"w": drawn(0)})
    part = Follower(spec, name="w", master=drawn(0)[start:stop])
    for step in range(1, 4):
        grad = drawn(step, torch.bfloat16)
        whole.step({"w": grad.float() / 3})
        part.step(grad[start:stop], update=PLAIN, norm=None)
    assert torch.equal(part.master, whole.masters["w"][start:stop])
    for key, value in whole.state()["w"].items():
        assert torch.equal(part.state[key], value[start:stop] if value.dim() else value)


def stepped(spec, grad, *, update=PLAIN, norm=None, divided=False):
    """Return the master after a step from zero with plain SGD, which is minus the gradient."""
    follower = Follower(spec, name="w", master=torch.zeros_like(grad))
    seen = follower.step(grad, update=update, norm=norm, divided=divided)
    return follower.master.tolist(), seen


SGD = OptimizerSpec(name="sgd", lr=1.0)


def test_divided_gradient_is_not_divided_again():
    grad = torch.tensor([3.0, 6.0])
    assert stepped(SGD, grad)[0] == [-1, -2]
    assert stepped(SGD, grad, divided=True)[0] == [-3, -6]


def test_loss_scale_is_removed():
    update = Update(division=Division(how="pre", count=3), scale=8.0, lr_factor=1.0)
    assert stepped(SGD, torch.tensor([8.0]), update=update)[0] == [-1]


def test_clips_by_the_given_norm():
    spec = OptimizerSpec(name="sgd", lr=1.0, clip_norm=1.0)
    (moved,), seen = stepped(spec, torch.tensor([6.0]), norm=torch.tensor(4.0))
    assert moved == pytest.approx(-0.5, abs=1e-6)
    assert seen == measure(torch.tensor([2.0]))


def test_clips_by_value():
    spec = OptimizerSpec(name="sgd", lr=1.0, clip_value=1.5)
    assert stepped(spec, torch.tensor([3.0, 9.0]))[0] == [-1, -1.5]


def test_param_group_follows_the_name():
    spec = OptimizerSpec(name="sgd", lr=1.0, groups=(ParamGroupSpec(match="w", lr=0.5),))
    assert stepped(spec, torch.tensor([3.0]))[0] == [-0.5]


def test_gradient_is_unchanged():
    grad = torch.tensor([3.0])
    stepped(OptimizerSpec(name="sgd", lr=1.0, clip_value=0.1), grad)
    assert grad.tolist() == [3]
