"""Named points: ignored outside a run, and hashes of all values inside one."""

import pytest
import torch

import zero_sim
from zero_sim.errors import UsageError
from zero_sim.script.record import PointRecorder


def digests(*things):
    recorder = PointRecorder()
    recorder.note("here", things, file="train.py", line=3)
    return dict(recorder.points[0].digests)


def test_checkpoint_outside_a_run_does_nothing():
    class Untouchable:
        def __getattribute__(self, name):
            raise AssertionError(name)

    assert zero_sim.checkpoint_here("after step", Untouchable()) is None


def test_every_tensor_has_a_name():
    model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.BatchNorm1d(1))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    model[0].bias.grad = None
    names = set(digests(model, optimizer, {"scale": [torch.ones(1), 2.0]}))
    assert {"0.weight", "0.weight.grad", "0.bias", "1.running_mean"} <= names
    assert "0.bias.grad" not in names
    assert {"optimizer 0.weight.exp_avg", "optimizer 0.weight.step"} <= names
    assert {"scale[0]", "scale[1]"} <= names


def test_optimizer_without_model_numbers_its_params():
    param = torch.nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    optimizer = torch.optim.SGD([param], momentum=0.9)
    optimizer.step()
    assert set(digests(optimizer)) == {"optimizer param 0.momentum_buffer"}


def test_hashes_depend_on_bits_dtype_and_shape():
    values = [
        torch.zeros(2),
        -torch.zeros(2),
        torch.zeros(2, 1),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(4, dtype=torch.bfloat16),
        torch.tensor(0.0),
        0.0,
    ]
    assert len({digests(value)["value 0"] for value in values}) == len(values)
    assert digests(values[0]) == digests(torch.zeros(4)[::2])


def test_tensors_without_memory_and_sparse_tensors_have_hashes():
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    sparse = torch.eye(2).to_sparse()
    found = digests(freed, torch.ones(2, device="meta"), sparse, torch.empty(0), torch.eye(2))
    assert len(found) == 5
    assert found["value 2"] == found["value 4"]


def test_value_without_bits_is_refused():
    with pytest.raises(UsageError, match="lists and tuples of these, got object"):
        digests({"config": object()})
