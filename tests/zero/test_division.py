"""Division by the world size."""

from __future__ import annotations

import pytest
import torch

from zero_sim.errors import UsageError
from zero_sim.zero.division import build_divisor, divide_, multiply_by_reciprocal_, set_divisor

CPU = torch.device("cpu")
WORLD_SIZES = [1, 2, 3, 5, 7, 10, 96, 257, 2**15 - 1]


class TestDivide:
    """divide_, which rounds the true quotient once."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("count", WORLD_SIZES)
    def test_all_16_bit_patterns_divide_as_in_torch(self, count, dtype):
        """All 65,536 bit patterns give the bits of torch's division by a number."""
        every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
        values = every.view(dtype)
        values = values[~values.isnan()]
        expected = values / count
        divided = values.clone()
        divide_(divided, divisor=build_divisor(count, device=CPU))
        assert torch.equal(divided.view(torch.int16), expected.view(torch.int16))

    @pytest.mark.parametrize("count", WORLD_SIZES)
    def test_fp32_quotient_is_rounded_to_nearest(self, count):
        """The reference is fp64, whose quotient rounds to the nearest fp32."""
        values = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
        expected = (values.double() / count).float()
        divide_(values, divisor=build_divisor(count, device=CPU))
        assert torch.equal(values, expected)

    def test_is_not_a_product_with_the_reciprocal(self):
        """For 7 ranks, the product with the reciprocal differs for many values."""
        values = torch.arange(1.0, 1001.0)
        divided = values.clone()
        divide_(divided, divisor=build_divisor(7, device=CPU))
        assert not torch.equal(divided, values * torch.tensor(1.0 / 7))


class TestReciprocal:
    """multiply_by_reciprocal_, which rounds both the reciprocal and the product."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("count", WORLD_SIZES)
    def test_is_rounded_before_the_product(self, count, dtype):
        """The reference is fp64, where the product of two rounded factors is exact."""
        values = torch.randn(10_000, generator=torch.Generator().manual_seed(0)).to(dtype)
        reciprocal = (torch.tensor(1.0) / count).to(dtype)
        expected = (values.double() * reciprocal.double()).to(dtype)
        multiply_by_reciprocal_(values, divisor=build_divisor(count, device=CPU))
        assert torch.equal(values, expected)


class TestSetDivisor:
    """set_divisor, which overwrites a divisor in place."""

    @pytest.mark.parametrize("count", [1, 2**24, 2**24 + 2, 3 * 2**30])
    def test_holds_the_count_exactly(self, count):
        """fp32 represents each of these counts."""
        divisor = build_divisor(5, device=CPU)
        set_divisor(divisor, count)
        assert int(divisor) == count

    @pytest.mark.parametrize("count", [-1, 0, 2**24 + 1, 2**30 + 2])
    def test_refuses_an_inexact_or_nonpositive_count(self, count):
        """fp32 cannot represent the count, or it is not positive."""
        divisor = build_divisor(5, device=CPU)
        with pytest.raises(UsageError, match=rf"{count}\. (Give|Call)"):
            set_divisor(divisor, count)
        assert int(divisor) == 5
