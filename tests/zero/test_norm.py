"""Gradient norm, its certificate, and clipping."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from zero_sim.zero.norm import (
    clip_by_norm_,
    clip_by_value_,
    measure_grads,
    root_of_squares,
)

CPU = torch.device("cpu")


def draw(count, *, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def measure(*grads):
    """Return sum of squares, zeros and overflows."""
    return measure_grads(grads, device=CPU).tolist()


class TestMeasure:
    """Squares, zeros and overflows of a rank's own gradients."""

    def test_no_gradients_give_zero(self):
        assert measure() == [0, 0, 0]

    def test_squares_are_not_rounded_to_fp32(self):
        """(2**12 + 1)**2 does not fit into the 24 bits of fp32."""
        assert measure(torch.tensor([4097.0])) == [4097.0**2, 0, 0]

    def test_squares_do_not_leave_the_range_of_fp64(self):
        """The squares of the largest and the smallest fp32 value are in the range of fp64."""
        largest = torch.finfo(torch.float32).max
        assert measure(torch.tensor([largest])) == [largest**2, 0, 0]
        assert measure(torch.tensor([2.0**-149])) == [2.0**-298, 0, 0]

    def test_counts_zeros_of_both_signs(self):
        """The count is over all gradients; a NaN is not a zero."""
        _, zeros, _ = measure(torch.tensor([0.0, -0.0, 1.0]), torch.tensor([math.nan, 0.0]))
        assert zeros == 3

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_overflow_flag_is_separate(self, value):
        """The flag is 1 even if the squares are not finite."""
        squares, zeros, overflows = measure(torch.tensor([value, 0.0]), torch.ones(1))
        assert not math.isfinite(squares)
        assert (zeros, overflows) == (1, 1)

    def test_gradients_are_unchanged(self):
        """Squaring happens on a copy."""
        grad = draw(10)
        kept = grad.clone()
        measure(grad)
        assert torch.equal(grad, kept)

    def test_norm_does_not_depend_on_cuts(self):
        """Forty draws, cut at random, all give the correctly rounded fp32 norm."""
        for seed in range(40):
            whole, generator = draw(1000, seed=seed), torch.Generator().manual_seed(seed)
            cuts = [0, *sorted(torch.randperm(1000, generator=generator)[:6].tolist()), 1000]
            parts = [whole[a:b] for a, b in pairwise(cuts)]
            one = root_of_squares(measure_grads([whole], device=CPU)[0])
            summed = sum(measure_grads([part], device=CPU) for part in parts)
            assert torch.equal(root_of_squares(summed[0]), one)
            assert one.item() == torch.tensor(
                math.sqrt(math.fsum(x * x for x in whole.tolist())), dtype=torch.float64
            ).to(torch.float32)


class TestClipByNorm:
    """clip_by_norm_, which scales all gradients by one number."""

    def test_scales_by_a_true_quotient(self):
        """For 7 / 11, the product with the reciprocal is a different fp32 number."""
        grad, norm = draw(1000), torch.tensor(11.0)
        tiny = torch.tensor(1e-6)
        expected = grad * (torch.tensor(7.0) / (norm + tiny))
        clip_by_norm_([grad], norm=norm, max_norm=7.0)
        assert torch.equal(grad, expected)

    def test_gradients_below_the_bound_are_unchanged(self):
        """Bits are equal, including signs of zeros."""
        grad = torch.tensor([0.0, -0.0, 1 / 3])
        kept = grad.clone()
        clip_by_norm_([grad], norm=torch.tensor(1 / 3), max_norm=1.0)
        assert torch.equal(grad.view(torch.int32), kept.view(torch.int32))

    def test_nan_norm_gives_nan_gradients(self):
        """A NaN norm must not pass for a small one."""
        grad = torch.ones(2)
        clip_by_norm_([grad], norm=torch.tensor(math.nan), max_norm=1.0)
        assert grad.isnan().all()


class TestClipByValue:
    """clip_by_value_, which clamps each element."""

    def test_clamps_on_both_sides(self):
        """The bound itself is allowed; a NaN stays."""
        grad = torch.tensor([-3.0, -2.0, 0.5, 2.0, math.inf, math.nan])
        clip_by_value_([grad], max_value=2.0)
        assert grad[:5].tolist() == [-2, -2, 0.5, 2, 2]
        assert grad[5].isnan()
