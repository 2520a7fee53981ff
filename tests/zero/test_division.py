"""Division by the world size."""

from __future__ import annotations

import pytest
import torch

from zero_sim.zero.division import build_divisor, divide_

CPU = torch.device("cpu")
WORLD_SIZES = [1, 2, 3, 5, 7, 10, 96, 257]


class TestDivide:
    """divide_ rounds the true quotient once."""

    @pytest.mark.parametrize("count", WORLD_SIZES)
    def test_of_every_bf16_is_that_of_torch(self, count):
        """All 65,536 bit patterns: the same bits as dividing the bf16 tensor by the number."""
        every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
        values = every.view(torch.bfloat16)
        values = values[~values.isnan()]
        expected = values / count
        divided = values.clone()
        divide_(divided, divisor=build_divisor(count, device=CPU))
        assert torch.equal(divided.view(torch.int16), expected.view(torch.int16))

    @pytest.mark.parametrize("count", WORLD_SIZES)
    def test_of_fp32_is_the_nearest_to_the_quotient(self, count):
        """Against fp64, whose quotient rounds to the nearest fp32."""
        values = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
        expected = (values.double() / count).float()
        divide_(values, divisor=build_divisor(count, device=CPU))
        assert torch.equal(values, expected)

    def test_is_not_a_product_with_the_reciprocal(self):
        """For 7 ranks the reciprocal would be wrong for a good part of all values."""
        values = torch.arange(1.0, 1001.0)
        divided = values.clone()
        divide_(divided, divisor=build_divisor(7, device=CPU))
        assert not torch.equal(divided, values * torch.tensor(1.0 / 7))
