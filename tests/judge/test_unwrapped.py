"""Changes to a module that an engine unwrapped after the last step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zero_sim.judge.checks.unwrapped import check_unwrapped, hooks_of, note_module
from zero_sim.scenario.spec import SystemSpec


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 3))


def messages(spoil, *, not_its_own=frozenset()):
    module = build()
    before = note_module(module)
    held = {name: param.detach().clone() for name, param in module.named_parameters()}
    given = spoil(module)
    found = check_unwrapped(
        module if given is None else given,
        before,
        held=held,
        not_its_own=not_its_own,
        step=3,
        rank=1,
    )
    said = list(found)
    assert {(each.check, each.step, each.rank) for each in said} <= {("invariant.given-back", 3, 1)}
    return [(each.param, each.message.removeprefix("the unwrapped module ")) for each in said]


def forward_hook(module):
    module[0].register_forward_pre_hook(print)


def state_dict_hook(module):
    module[1].register_state_dict_post_hook(lambda *args: None)


def param_hook(module):
    module[0].weight.register_hook(print)


def gradient_hook(module):
    module[0].bias.register_post_accumulate_grad_hook(print)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (forward_hook, "has a new hook: _forward_pre_hooks of module '0'"),
        (state_dict_hook, "has a new hook: _state_dict_hooks of module '1'"),
        (param_hook, "has a new hook: _backward_hooks of param '0.weight'"),
        (
            gradient_hook,
            "has a new hook: _post_accumulate_grad_hooks of param '0.bias'",
        ),
    ],
)
def test_hook_that_remains_is_named(spoil, words):
    assert messages(spoil) == [(None, words)]


def test_hooks_of_others_are_ignored():
    module = build()
    before = note_module(module)
    forward_hook(module)
    own = hooks_of(module) - before.hooks
    assert [*check_unwrapped(module, before, held={}, not_its_own=own, step=0, rank=0)] == []


def test_other_class_and_new_attribute_are_named():
    def spoil(module):
        module[2] = nn.Bilinear(3, 3, 3)
        module[0].cache = ()

    said = {words for _, words in messages(spoil)}
    assert "has another class in place of Linear at '2': Bilinear" in said
    assert "has a new attribute 'cache' of module '0'" in said


def view(module):
    module[1].weight.data = torch.cat([module[1].weight.data, torch.ones(1, 3)])[:3]


def placeholder(module):
    module[1].weight.data = torch.zeros(1).expand(3, 3)


def gradient(module):
    module[1].weight.grad = torch.zeros(3, 3)


def other_values(module):
    module[1].weight.data[2, 1] += 1


def other_object(module):
    module[1].weight = nn.Parameter(module[1].weight.data)


def other_dtype(module):
    module[1].weight.data = module[1].weight.data.double()


def shared(module):
    module[1].weight.data = module[2].weight.data


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (view, "has a param of 36 bytes in a foreign storage of 48 bytes"),
        (placeholder, "has a param of 36 bytes in a foreign storage of 4 bytes"),
        (gradient, "still has a gradient of a param"),
        (other_values, "has other values of a param than the engine had"),
        (other_object, "has another object in place of a param"),
        (other_dtype, "has a param of other shape or dtype: (3, 3), torch.float64"),
    ],
)
def test_changed_param_is_named(spoil, words):
    assert ("1.weight", words) in messages(spoil)


def test_two_params_in_one_storage_are_named():
    assert any("in a foreign storage" in words for _, words in messages(shared))


def test_unchanged_module_has_no_findings():
    assert messages(lambda module: None) == []


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_hook_left_by_our_own_system_is_found_at_every_stage(judged, broken, stage):
    broken("K01")
    result = judged(system=SystemSpec(stage=stage))
    assert {finding.check for finding in result.findings} == {"invariant.given-back"}


def test_finding_names_the_last_step(judged, broken):
    broken("K04")
    assert {finding.step for finding in judged().findings} == {1}
