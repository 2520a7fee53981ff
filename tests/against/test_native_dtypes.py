"""Native dtypes: scripts observe the dtypes they requested, while floats are stored in float64."""

import copy
import io

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zero_sim.against import native_dtypes
from zero_sim.against.native_dtypes import stored
from zero_sim.against.wide_operations import WideOperations
from zero_sim.errors import UnsupportedByFloat64


@pytest.fixture(autouse=True)
def _in_float64():
    with native_dtypes.installed(), WideOperations(counts=lambda: True):
        yield


def test_training_state_has_native_dtypes():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    rows = torch.randn(5, 4)
    loss = F.mse_loss(model(rows), rows[:, :2])
    loss.backward()
    optimizer.step()
    state = optimizer.state[model[0].weight]
    for tensor in (model[0].weight, rows, loss, state["exp_avg"], state["step"]):
        assert tensor.dtype is torch.float32
        assert stored(tensor) is torch.float64


def test_cast_of_another_native_dtype_copies():
    grad = torch.zeros(3, dtype=torch.bfloat16)
    copied = grad.float()
    assert copied.dtype is torch.float32
    assert copied.data_ptr() != grad.data_ptr()


def test_cast_to_the_native_dtype_returns_the_tensor():
    grad = torch.zeros(3)
    assert grad.float() is grad
    assert grad.to(torch.float32).data_ptr() == grad.data_ptr()


def test_double_of_a_float32_tensor_is_a_copy():
    grad = torch.zeros(3)
    wide = grad.double()
    assert wide.dtype is torch.float64
    assert wide.data_ptr() != grad.data_ptr()


def test_gradient_has_the_dtype_of_its_param():
    weight = torch.ones(3, requires_grad=True)
    (weight.bfloat16() * 2).sum().backward()
    assert weight.grad.dtype is torch.float32
    assert weight.grad.float().data_ptr() == weight.grad.data_ptr()


def test_hooks_see_native_gradients():
    seen = []
    model = nn.Linear(2, 2).bfloat16()
    model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.dtype))
    model(torch.ones(1, 2).bfloat16()).sum().backward()
    assert seen == [torch.bfloat16]


@pytest.mark.parametrize(
    ("one", "other", "result"),
    [
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float16, torch.bfloat16, torch.float32),
        (torch.float32, torch.float64, torch.float64),
        (torch.bfloat16, torch.int64, torch.bfloat16),
    ],
)
def test_results_have_the_promoted_dtype(one, other, result):
    assert (torch.zeros(2, dtype=one) + torch.zeros(2, dtype=other)).dtype is result
    assert torch.result_type(torch.zeros(2, dtype=one), torch.zeros(2, dtype=other)) is result


def test_sizes_in_bytes_are_native():
    tensor = torch.zeros(3)
    assert (tensor.element_size(), tensor.itemsize, tensor.nbytes) == (4, 4, 12)
    assert tensor.untyped_storage().nbytes() == 12


def test_storage_freed_and_allocated_by_native_bytes():
    tensor = torch.zeros(3)
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)
    assert tensor.fill_(1.0).sum() == 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.FloatTensor(5),
        lambda: torch.FloatTensor([1.0, 2.0]),
        lambda: torch.from_numpy(np.ones(3, dtype=np.float32)),
        lambda: torch.tensor([1.0, 2.0]),
        lambda: torch.as_tensor(np.ones(2, dtype=np.float32)),
        lambda: torch.randn(2),
        lambda: torch.zeros_like(torch.zeros(2)),
        lambda: nn.Parameter(torch.zeros(3)),
        lambda: copy.deepcopy(nn.Linear(2, 2)).weight,
        lambda: next(iter(DataLoader(TensorDataset(torch.randn(4, 3)), batch_size=2)))[0],
    ],
)  # fmt: skip
def test_new_floats_are_stored_in_float64(make):
    tensor = make()
    assert stored(tensor) is torch.float64
    assert tensor.dtype is torch.float32


def test_meta_params_are_stored_in_float64_when_materialised():
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    model.to_empty(device="cpu")
    assert stored(model.weight) is torch.float64
    assert model.weight.dtype is torch.float32


def test_quotient_of_integers_is_not_rounded_to_float32():
    assert (torch.tensor(1) / torch.tensor(3)).item() == 1 / 3


def test_checkpoint_keeps_all_digits():
    file = io.BytesIO()
    torch.save({"third": torch.tensor(1) / 3}, file)
    file.seek(0)
    third = torch.load(file)["third"]
    assert third.item() == 1 / 3
    assert third.dtype is torch.float32


def test_gradient_scaler_works_under_autocast():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(torch.randn(3, 2))
    assert out.dtype is torch.bfloat16
    scaler.scale(out.float().sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert torch.isfinite(model.weight).all()


def test_type_names_are_native():
    half = torch.zeros(2, dtype=torch.float16)
    assert half.type() == "torch.HalfTensor"
    assert half.to("cpu", torch.float32).dtype is torch.float32
    assert half.type_as(torch.zeros(1)).dtype is torch.float32


def test_view_of_a_float_as_integers_is_refused_by_name():
    with pytest.raises(UnsupportedByFloat64, match=r"Tensor.view\(torch.int32\)"):
        torch.zeros(2).view(torch.int32)


def test_complex_numbers_have_native_dtypes():
    spectrum = torch.fft.rfft(torch.randn(8))
    assert spectrum.dtype is torch.complex64
    assert spectrum.abs().dtype is torch.float32
    assert torch.view_as_real(spectrum).dtype is torch.float32


def test_norms_of_several_dtypes_keep_each():
    norms = torch._foreach_norm([torch.ones(2), torch.ones(2, dtype=torch.bfloat16)])
    assert [norm.dtype for norm in norms] == [torch.float32, torch.bfloat16]
