"""Memory layout of params in the reference, which decides the bits of a product."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from zero_sim.reference.placement import (
    MemoryLayout,
    memory_layout_of,
    modulus_bytes,
    move_params,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("address", [0, 4, 20, 60])
def test_param_moves_to_the_address_with_its_values(dtype, address):
    param = nn.Parameter(torch.arange(15).reshape(3, 5).to(dtype))
    before = param.detach().clone()
    wanted = MemoryLayout(address, (5, 1))
    move_params({"w": param}, {"w": wanted})
    assert memory_layout_of(param) == wanted
    assert torch.equal(param.detach(), before)


def test_unnamed_and_empty_params_stay():
    stays, empty = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(0))
    place = stays.data_ptr()
    move_params({"stays": stays, "empty": empty}, {"empty": MemoryLayout(4, (1,))})
    assert stays.data_ptr() == place


def test_equal_addresses_give_equal_products_on_one_row():
    generator = torch.Generator().manual_seed(0)
    for trial in range(200):
        inputs, outputs = (int(n) for n in torch.randint(1, 50, (2,), generator=generator))
        weight = torch.randn(outputs, inputs, generator=generator)
        row = torch.randn(1, inputs, generator=generator)
        start = trial % (modulus_bytes(weight.device) // 4)
        flat = torch.zeros(start + weight.numel())
        view = flat[start:].view(outputs, inputs)
        view.copy_(weight)
        alone = nn.Parameter(weight)
        move_params({"w": alone}, {"w": memory_layout_of(view)})
        assert torch.equal(functional.linear(row, alone), functional.linear(row, view))


@pytest.mark.parametrize("strides", [(3, 1), (1, 2)])
def test_param_gets_the_strides_too(strides):
    values = torch.arange(6.0).view(2, 3)
    param = nn.Parameter(values.clone())
    move_params({"w": param}, {"w": MemoryLayout(8, strides)})
    assert memory_layout_of(param) == MemoryLayout(8, strides)
    assert torch.equal(param.detach(), values)
