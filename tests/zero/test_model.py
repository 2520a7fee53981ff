"""Which params are trained, and which modules cannot be."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zero_sim.errors import ModelError
from zero_sim.zero.model import find_trainable_params


def holding(**params):
    """Make a module that holds these params."""
    module = nn.Module()
    for name, param in params.items():
        module.register_parameter(name, param)
    return module


class TestFound:
    """Trainable params come by name, in registration order."""

    def test_skip_frozen_ones(self):
        """A frozen param is not trained."""
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        module[0].requires_grad_(False)
        assert list(find_trainable_params(module)) == ["1.weight", "1.bias"]

    def test_hold_a_tied_one_once(self):
        """A param with two names is one param, under the first name."""
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
        module[1].weight = module[0].weight
        assert list(find_trainable_params(module)) == ["0.weight", "0.bias"]

    def test_may_be_frozen_in_any_dtype(self):
        """What is not trained may have a dtype that could not be."""
        frozen = nn.Parameter(torch.zeros(2, dtype=torch.float64), requires_grad=False)
        module = holding(frozen=frozen, w=nn.Parameter(torch.zeros(2)))
        assert list(find_trainable_params(module)) == ["w"]


class TestRefused:
    """What cannot be trained is refused with its name."""

    def test_without_a_trainable_param(self):
        """A module of frozen params has nothing to train."""
        with pytest.raises(ModelError, match="Linear with 2 params, all frozen"):
            find_trainable_params(nn.Linear(2, 2).requires_grad_(False))

    def test_on_two_devices(self, monkeypatch):
        """Both params are named with their devices."""

        class Elsewhere(nn.Parameter):
            device = torch.device("cuda:0")

        module = holding(a=nn.Parameter(torch.zeros(1)), b=Elsewhere(torch.zeros(1)))
        with pytest.raises(ModelError, match="'a' on cpu and 'b' on cuda:0"):
            find_trainable_params(module)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
    def test_of_another_dtype(self, dtype):
        """Half, double and complex params are refused, and told what would do."""
        module = holding(w=nn.Parameter(torch.zeros(2, dtype=dtype)))
        with pytest.raises(ModelError, match=rf"float32, .*float16, got 'w' of {dtype}"):
            find_trainable_params(module)

    def test_of_sparse_layout(self):
        """A sparse param has no flat memory."""
        module = holding(w=nn.Parameter(torch.eye(2).to_sparse()))
        with pytest.raises(ModelError, match=r"'w' with layout torch\.sparse_coo"):
            find_trainable_params(module)

    @pytest.mark.parametrize(
        "module", [nn.LazyLinear(2), nn.Linear(2, 2, device="meta")], ids=["lazy", "meta"]
    )
    def test_without_values(self, module):
        """Lazy and meta params have nothing to train yet."""
        with pytest.raises(ModelError, match="'weight', which has none yet"):
            find_trainable_params(module)

    def test_in_one_memory(self):
        """Two params that share memory would silently come apart; both are named."""
        memory = torch.zeros(6)
        module = holding(a=nn.Parameter(memory[:4]), b=nn.Parameter(memory[3:]))
        with pytest.raises(ModelError, match="'a' and 'b', which overlap"):
            find_trainable_params(module)

    def test_not_for_being_neighbours_in_one_memory(self):
        """Params next to each other in one storage are fine."""
        memory = torch.zeros(6)
        module = holding(a=nn.Parameter(memory[:3]), b=nn.Parameter(memory[3:]))
        assert len(find_trainable_params(module)) == 2
