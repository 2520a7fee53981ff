"""The residual MLP."""

from __future__ import annotations

import torch
from torch import nn

from zero_sim.workloads import build_workload


def test_block_has_8h2_plus_5h_params(make_scenario):
    module = build_workload(make_scenario("mlp", hidden=8, blocks=3)).build()
    assert sum(param.numel() for param in module.parameters()) == 3 * (8 * 8**2 + 5 * 8)


def test_params_come_in_order_of_use(make_scenario):
    module = build_workload(make_scenario("mlp", hidden=2, blocks=2)).build()
    shapes = {name: tuple(param.shape) for name, param in module.named_parameters()}
    assert list(shapes.items())[:5] == [
        ("0.up.weight", (8, 2)),
        ("0.up.bias", (8,)),
        ("0.down.weight", (2, 8)),
        ("0.down.bias", (2,)),
        ("1.up.weight", (8, 2)),
    ]


def test_block_adds_to_its_input(make_scenario):
    """With all weights zero a block is the identity."""
    module = build_workload(make_scenario("mlp", hidden=4)).build()
    for param in module.parameters():
        param.detach().zero_()
    x = torch.linspace(-1.0, 1.0, 12).view(3, 4)
    assert torch.equal(module(x), x)


def test_layers_are_torch_linear(make_scenario):
    """Systems may wrap or replace layers by their type."""
    module = build_workload(make_scenario("mlp", hidden=2)).build()
    layers = [type(part) for part in module.modules() if not list(part.children())]
    assert layers == [nn.Linear] * 4
    assert repr(module[0].up) == "Linear(in_features=2, out_features=8, bias=True)"
