"""Values survive JSON bit for bit."""

from __future__ import annotations

import json
import math

import pytest
import torch

from zero_sim.checkpoint.values import decode_value, encode_value, view_bytes
from zero_sim.errors import CheckpointError


@pytest.mark.parametrize(
    "value",
    [None, True, False, 7, 1e-3, 0.1 + 0.2, -0.0, 5e-324, math.inf, "x", (0.9, 0.999), [1, (2,)]],
)
def test_python_values_survive(value):
    decoded = decode_value(json.loads(json.dumps(encode_value(value), allow_nan=False)))
    assert repr(decoded) == repr(value)


def test_nan_survives():
    assert math.isnan(decode_value(json.loads(json.dumps(encode_value(math.nan)))))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.0),
        torch.tensor(-0.0),
        torch.tensor(1 / 3, dtype=torch.float64),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.tensor(-7),
        torch.tensor(True),
        torch.tensor(float("nan")),
    ],
    ids=str,
)
def test_0d_tensors_survive(tensor):
    decoded = decode_value(json.loads(json.dumps(encode_value(tensor))))
    assert (decoded.dtype, decoded.shape) == (tensor.dtype, ())
    assert bytes(view_bytes(decoded)) == bytes(view_bytes(tensor))


@pytest.mark.parametrize(
    "value", [object(), {"a": 1}, torch.zeros(2), torch.tensor(1j)], ids=["0", "1", "2", "3"]
)
def test_other_values_are_refused(value):
    """Nothing is pickled."""
    with pytest.raises(CheckpointError):
        encode_value(value)
