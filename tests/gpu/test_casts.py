"""Casts to narrow dtypes against the CPU: rounded to nearest, ties to even."""

import pytest
import torch

WORDS = {1: torch.uint8, 2: torch.int16}
SIXTEEN_BITS = (torch.bfloat16, torch.float16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def bits(values):
    """Return the bits of each value, with one number for all NaNs regardless of payload."""
    words = values.view(WORDS[values.element_size()]).int()
    return words.masked_fill(values.float().isnan(), -(1 << 20))


def every_value(dtype):
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)


def around_the_middles():
    """Return fp32 values on, next to and midway between bf16 values of every sign and exponent."""
    upper = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    return (upper.unsqueeze(1) | lower).reshape(-1).view(torch.float32)


@pytest.mark.parametrize(
    ("source", "dtype"),
    [
        *((torch.float32, dtype) for dtype in SIXTEEN_BITS),
        *((source, dtype) for source in (torch.float32, *SIXTEEN_BITS) for dtype in FP8),
    ],
)
def test_narrowing_cast_matches_cpu(device, source, dtype):
    values = around_the_middles() if source == torch.float32 else every_value(source)
    assert torch.equal(bits(values.to(device).to(dtype).cpu()), bits(values.to(dtype)))


@pytest.mark.parametrize("dtype", FP8)
def test_fp8_to_fp32_matches_cpu(device, dtype):
    values = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    assert torch.equal(
        values.to(device).float().cpu().nan_to_num(nan=-1e30), values.float().nan_to_num(nan=-1e30)
    )
