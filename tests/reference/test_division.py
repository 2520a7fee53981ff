"""Division before and after the sum."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from zero_sim.reference.division import Division, count_contributions

BF16 = torch.bfloat16


class TestNone:
    """No division."""

    def test_the_sum_is_the_optimizers_gradient(self):
        """Both methods return their input."""
        grad = torch.tensor([3.0])
        division = Division(how="none", count=3)
        assert division.before(grad) is grad
        division.after_(grad)
        assert grad.item() == 3.0


class TestPre:
    """True division in the gradient's dtype."""

    def test_rounds_to_the_dtype(self):
        """1/3 is rounded to bf16 and not divided again."""
        third = Division(how="pre", count=3).before(torch.tensor([1.0], dtype=BF16))
        assert (third.item(), third.dtype) == (0.333984375, BF16)
        Division(how="pre", count=3).after_(third)
        assert third.item() == 0.333984375

    @pytest.mark.parametrize("count", [3, 7, 257, 1000])
    def test_bf16_quotient_is_the_nearest(self, count):
        """Even for counts outside bf16, no neighbor is closer to the exact quotient."""
        values = torch.arange(128, 256).to(BF16)
        for value, got in zip(values, Division(how="pre", count=count).before(values), strict=True):
            exact = Fraction(value.item()) / count
            ends = (torch.tensor(end, dtype=BF16) for end in (0.0, 1e9))
            around = [torch.nextafter(got, end).item() for end in ends]
            error = abs(Fraction(got.item()) - exact)
            assert all(error <= abs(Fraction(other) - exact) for other in around)


class TestPost:
    """True division of the fp32 sum."""

    def test_is_not_before_the_sum(self):
        grad = torch.tensor([1.0], dtype=BF16)
        division = Division(how="post", count=3)
        assert division.before(grad) is grad
        assert not division.is_before

    @pytest.mark.parametrize("how", ["pre", "post"])
    @pytest.mark.parametrize("count", [3, 5, 6, 7, 13, 15])
    def test_quotient_is_correctly_rounded(self, how, count):
        """Products with a rounded reciprocal are not."""
        values = torch.arange(1, 4000, dtype=torch.float32)
        exact = (values.double() / count).float()
        division = Division(how=how, count=count)
        got = division.before(values.clone())
        division.after_(got)
        assert torch.equal(got, exact)


class TestPremul:
    """Product with a rounded reciprocal."""

    def test_reciprocal_is_rounded_twice(self):
        """1/3 is rounded to fp32, then to bf16; 5 times that is 1.669921875, in bf16 1.671875."""
        division = Division(how="premul", count=3)
        assert division.reciprocal(BF16).item() == 0.333984375
        assert division.before(torch.tensor([5.0], dtype=BF16)).item() == 1.671875

    def test_differs_from_division(self):
        """For 7, fp32 products differ from the quotients; each is the exact product, rounded."""
        values = torch.arange(1, 4000, dtype=torch.float32)
        seventh = torch.tensor(1 / 7, dtype=torch.float64).float()
        got = Division(how="premul", count=7).before(values)
        assert torch.equal(got, (values.double() * seventh.double()).float())
        assert not torch.equal(got, values / 7)


@pytest.mark.parametrize(("by", "count"), [("ranks", 3), ("micro-batches", 6), ("tokens", 31)])
def test_count(by, count):
    """Three ranks, six micro-batches and 31 rows over all ranks."""
    assert count_contributions(by, rank_count=3, micro_batches=6, rows=31) == count
