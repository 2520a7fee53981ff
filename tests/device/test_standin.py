"""The stand-in device: CUDA's refusals, and CUDA's results where they are known."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from tests.standin import NAME
from tests.standin.build import build, library_path

ONE, OTHER = f"{NAME}:0", f"{NAME}:1"
MIXED = "Expected all tensors to be on the same device"
ADDRESS_BYTES = 512


def on_device(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype, device=ONE)


@pytest.mark.parametrize("place", ["cpu", OTHER])
@pytest.mark.parametrize(
    "mixing",
    [
        lambda x, y: x + y,
        lambda x, y: x.add_(y),
        lambda x, y: torch.cat([x, y]),
        lambda x, y: torch.stack([x, y]),
        lambda x, y: torch.equal(x, y),
        lambda x, y: x.dot(y),
        lambda x, y: torch.where(x > 0, x, y),
        lambda x, y: torch._foreach_add([x], [y]),
        lambda x, y: nn.functional.linear(x, y.reshape(1, -1)),
    ],
)
def test_mixed_devices_are_refused(mixing, place):
    with pytest.raises(RuntimeError, match=MIXED):
        mixing(on_device(1, 2), torch.tensor([1.0, 2.0], device=place))


def test_cpu_scalar_is_accepted_in_pointwise_ops():
    assert (on_device(1, 2) * torch.tensor(3.0)).tolist() == [3, 6]


def test_cpu_scalar_is_refused_in_other_ops():
    scalar = on_device(1).squeeze()
    for function in (lambda x: torch.stack([scalar, x]), lambda x: torch.equal(scalar, x)):
        with pytest.raises(RuntimeError, match=MIXED):
            function(torch.tensor(3.0))


def test_cpu_indices_are_accepted_in_brackets():
    x = on_device(1, 2, 3)
    x[torch.tensor([0])] = 5
    assert x[torch.tensor([2, 0])].tolist() == [3, 5]


@pytest.mark.parametrize("name", ["gather", "index_select"])
def test_cpu_indices_are_refused_elsewhere(name):
    with pytest.raises(RuntimeError, match=MIXED):
        getattr(on_device(1, 2, 3), name)(0, torch.tensor([0]))


def test_division_by_number_multiplies_by_reciprocal():
    x = torch.arange(1, 1000, dtype=torch.float32)
    reciprocal = torch.tensor(1 / 3, dtype=torch.float32)
    assert not torch.equal(x * reciprocal, x / 3)
    for quotient in (x.to(ONE) / 3, x.to(ONE).div_(3), x.to(ONE) / torch.tensor(3.0)):
        assert torch.equal(quotient.cpu(), x * reciprocal)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_division_by_number_rounds_once(dtype):
    x = torch.arange(1, 200).to(dtype)
    wanted = (x.float() * torch.tensor(1 / 3, dtype=torch.float32)).to(dtype)
    assert torch.equal((x.to(ONE) / 3).cpu(), wanted)


def test_division_by_device_tensor_is_exact_division():
    x = torch.arange(1, 1000, dtype=torch.float32)
    assert torch.equal((x.to(ONE) / on_device(3)).cpu(), x / 3)
    (listed,) = torch._foreach_div([x.to(ONE)], 3)
    assert torch.equal(listed.cpu(), x / 3)


def test_addresses_are_aligned_and_unreadable_by_the_process():
    addresses = [torch.empty(3, device=ONE).data_ptr() for _ in range(5)]
    assert all(address % ADDRESS_BYTES == 0 and address >> 62 for address in addresses)
    code = f"import ctypes; ctypes.string_at({addresses[0]}, 1)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode < 0


def test_fresh_memory_holds_nan():
    assert torch.empty(3, device=ONE).isnan().all()


def test_device_rng_is_independent_of_cpu():
    torch.manual_seed(3)
    of_device, of_cpu = torch.rand(4, device=ONE), torch.rand(4)
    assert not torch.equal(of_device.cpu(), of_cpu)
    torch.manual_seed(3)
    torch.rand(100)
    assert torch.equal(torch.rand(4, device=ONE), of_device)
    state = torch.standin.get_rng_state()
    dropped = nn.functional.dropout(torch.ones(100, device=ONE))
    torch.standin.set_rng_state(state)
    assert torch.equal(nn.functional.dropout(torch.ones(100, device=ONE)), dropped)


class TestStreams:
    def test_side_stream_write_is_visible_after_wait(self):
        x, side = torch.zeros(2, device=ONE), torch.standin.Stream()
        with torch.standin.stream(side):
            x.add_(1)
        assert x.tolist() == [0, 0]
        torch.standin.current_stream().wait_stream(side)
        assert x.tolist() == [1, 1]

    def test_event_orders_earlier_operations_only(self):
        x, side, event = torch.zeros(1, device=ONE), torch.standin.Stream(), torch.Event(NAME)
        with torch.standin.stream(side):
            x.add_(1)
            event.record()
            x.add_(1)
        event.synchronize()
        assert x.item() == 1
        side.synchronize()
        assert x.item() == 2

    def test_pinned_copy_lands_at_synchronize(self):
        there = torch.zeros(2).pin_memory()
        there.copy_(on_device(1, 2), non_blocking=True)
        assert there.tolist() == [0, 0]
        torch.standin.synchronize()
        assert there.tolist() == [1, 2]

    def test_pageable_copy_lands_at_once(self):
        there = torch.zeros(2)
        there.copy_(on_device(1, 2), non_blocking=True)
        assert there.tolist() == [1, 2]

    def test_copy_takes_the_value_at_issue(self):
        x, there = on_device(1), torch.zeros(1).pin_memory()
        there.copy_(x, non_blocking=True)
        x.add_(1)
        torch.standin.synchronize()
        assert there.item() == 1

    def test_pinned_source_is_read_late(self):
        x, here = torch.zeros(1, device=ONE), torch.ones(1).pin_memory()
        x.copy_(here, non_blocking=True)
        here.fill_(5)
        assert x.item() == 5

    def test_first_event_query_returns_false(self):
        there = torch.zeros(1).pin_memory()
        there.copy_(on_device(1), non_blocking=True)
        event = torch.standin.current_stream().record_event()
        assert [event.query(), event.query(), there.item()] == [False, True, 1]


def test_training_equals_cpu_training():
    """Kernels, autograd and an optimizer agree on whole numbers, which no kernel rounds."""

    def trained(device):
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(torch.arange(param.numel()).view(param.shape) % 5 - 2)
        model.to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.full((3, 4), step + 1.0, device=device)).sum().backward()
            optimizer.step()
        return [param.detach().cpu() for param in model.parameters()]

    pairs = zip(trained(ONE), trained("cpu"), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


def test_existing_build_is_reused():
    before = library_path().stat().st_mtime_ns
    assert build() == library_path()
    assert library_path().stat().st_mtime_ns == before
