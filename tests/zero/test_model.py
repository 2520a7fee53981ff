"""Trainable params, and modules that cannot be trained."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zero_sim.errors import ModelError
from zero_sim.zero.model import find_trainable_params


def holding(**params):
    """Make a module with these params."""
    module = nn.Module()
    for name, param in params.items():
        module.register_parameter(name, param)
    return module


class TestFound:
    """Trainable params by name, in registration order."""

    def test_skip_frozen_params(self):
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        module[0].requires_grad_(False)
        assert list(find_trainable_params(module)) == ["1.weight", "1.bias"]

    def test_list_a_tied_param_once(self):
        """A param with two names is listed under its first name."""
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
        module[1].weight = module[0].weight
        assert list(find_trainable_params(module)) == ["0.weight", "0.bias"]

    def test_may_be_frozen_in_any_dtype(self):
        frozen = nn.Parameter(torch.zeros(2, dtype=torch.float64), requires_grad=False)
        module = holding(frozen=frozen, w=nn.Parameter(torch.zeros(2)))
        assert list(find_trainable_params(module)) == ["w"]


class TestRefused:
    """Modules that cannot be trained."""

    def test_without_a_trainable_param(self):
        with pytest.raises(ModelError, match="Linear with 2 params, all frozen"):
            find_trainable_params(nn.Linear(2, 2).requires_grad_(False))

    def test_on_two_devices(self, monkeypatch):

        class Elsewhere(nn.Parameter):
            device = torch.device("cuda:0")

        module = holding(a=nn.Parameter(torch.zeros(1)), b=Elsewhere(torch.zeros(1)))
        with pytest.raises(ModelError, match="'a' on cpu and 'b' on cuda:0"):
            find_trainable_params(module)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
    def test_unsupported_dtype(self, dtype):
        """The message lists the supported dtypes."""
        module = holding(w=nn.Parameter(torch.zeros(2, dtype=dtype)))
        with pytest.raises(ModelError, match=rf"float32, .*float16, got 'w' of {dtype}"):
            find_trainable_params(module)

    def test_sparse_layout(self):
        """A sparse param has no flat memory."""
        module = holding(w=nn.Parameter(torch.eye(2).to_sparse()))
        with pytest.raises(ModelError, match=r"'w' with layout torch\.sparse_coo"):
            find_trainable_params(module)

    @pytest.mark.parametrize(
        "module", [nn.LazyLinear(2), nn.Linear(2, 2, device="meta")], ids=["lazy", "meta"]
    )
    def test_without_values(self, module):
        with pytest.raises(ModelError, match="'weight', which has none yet"):
            find_trainable_params(module)

    def test_overlapping_memory(self):
        """Wrapping would separate params that share memory."""
        memory = torch.zeros(6)
        module = holding(a=nn.Parameter(memory[:4]), b=nn.Parameter(memory[3:]))
        with pytest.raises(ModelError, match="'a' and 'b', which overlap"):
            find_trainable_params(module)

    def test_adjacent_memory_is_accepted(self):
        """Adjacent params in a storage do not overlap."""
        memory = torch.zeros(6)
        module = holding(a=nn.Parameter(memory[:3]), b=nn.Parameter(memory[3:]))
        assert len(find_trainable_params(module)) == 2
