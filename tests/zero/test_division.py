"""Division by the world size."""

from __future__ import annotations

import pytest
import torch

from zero_sim.errors import UsageError
from zero_sim.zero.division import build_divisor, divide_, multiply_by_reciprocal_, set_divisor

CPU = torch.device("cpu")
WORLD_SIZES = [1, 2, 3, 5, 7, 10, 96, 257, 2**15 - 1]


class TestDivide:
    """divide_ rounds the true quotient once."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("count", WORLD_SIZES)
    def test_of_every_16_bits_is_that_of_torch(self, count, dtype):
        """All 65,536 bit patterns: the same bits as dividing the tensor by the number."""
        every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
        values = every.view(dtype)
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


class TestReciprocal:
    """multiply_by_reciprocal_ rounds the reciprocal, then the product, to the values' dtype."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("count", WORLD_SIZES)
    def test_is_rounded_before_the_product(self, count, dtype):
        """Against fp64, in which the product of two rounded factors is exact."""
        values = torch.randn(10_000, generator=torch.Generator().manual_seed(0)).to(dtype)
        reciprocal = (torch.tensor(1.0) / count).to(dtype)
        expected = (values.double() * reciprocal.double()).to(dtype)
        multiply_by_reciprocal_(values, divisor=build_divisor(count, device=CPU))
        assert torch.equal(values, expected)


class TestSetDivisor:
    """set_divisor overwrites a divisor in place."""

    @pytest.mark.parametrize("count", [1, 2**24, 2**24 + 2, 3 * 2**30])
    def test_holds_the_count_exactly(self, count):
        """Where fp32 can."""
        divisor = build_divisor(5, device=CPU)
        set_divisor(divisor, count)
        assert int(divisor) == count

    @pytest.mark.parametrize("count", [-1, 0, 2**24 + 1, 2**30 + 2])
    def test_refuses_what_it_cannot_hold(self, count):
        """And what nothing can be divided by."""
        divisor = build_divisor(5, device=CPU)
        with pytest.raises(UsageError, match=rf"{count}\. (Give|Call)"):
            set_divisor(divisor, count)
        assert int(divisor) == 5
