"""Equal fp8 scales and values in system and reference, for any master."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.profiles import at_most
from zero_sim.reference.quantization import encode, scale_for
from zero_sim.zero.variants.fp8 import choose_scale, measure_amax, quantize_

DTYPES = st.sampled_from([torch.float8_e4m3fn, torch.float8_e5m2])
MASTERS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=9)


@given(dtype=DTYPES, bits=MASTERS)
@settings(max_examples=at_most(2000))
def test_any_master_bits_quantize_alike(dtype, bits):
    """Masters may be subnormal, huge, infinite or NaN."""
    master = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)
    scale = choose_scale(measure_amax(master), dtype=dtype)
    assert torch.equal(scale, scale_for(master, dtype=dtype))
    values = torch.empty_like(master, dtype=dtype)
    quantize_(values, master, scale=scale)
    expected = encode(master, scale=scale, dtype=dtype)
    assert torch.equal(values.float().nan_to_num(nan=7e7), expected.float().nan_to_num(nan=7e7))
    numbers = values.float()[~master.isnan()]
    assert bool((numbers * scale).isfinite().all())


@given(dtype=DTYPES, exponent=st.integers(-70, 80), bits=MASTERS)
@settings(max_examples=at_most(500))
def test_power_of_two_scaling_keeps_quantized_values(dtype, exponent, bits):
    """Multiplying a master by a power of two multiplies only its scale."""
    master = (torch.tensor(bits, dtype=torch.float64) / 2**32).to(torch.float32)
    scale = choose_scale(measure_amax(master), dtype=dtype)
    other = choose_scale(measure_amax(master * 2.0**exponent), dtype=dtype)
    left, right = (torch.empty_like(master, dtype=dtype) for _ in range(2))
    quantize_(left, master, scale=scale)
    quantize_(right, master * 2.0**exponent, scale=other)
    if master.any():
        assert other.item() == scale.item() * 2.0**exponent
        assert torch.equal(left.view(torch.uint8), right.view(torch.uint8))
