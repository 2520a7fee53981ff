"""Scale of dynamic loss scaling."""

from __future__ import annotations

import math

import pytest
import torch

from zero_sim.errors import UsageError
from zero_sim.zero.variants.scaler import LossScaler


class TestUpdate:
    """Updates of the scale after finite and skipped steps."""

    def test_doubles_after_enough_good_steps_in_a_row(self):
        scaler = LossScaler(scale=8.0, growth_interval=2)
        seen = []
        for _ in range(5):
            scaler.update(found_inf=False)
            seen.append((scaler.scale, scaler.good_steps))
        assert seen == [(8, 1), (16, 0), (16, 1), (32, 0), (32, 1)]

    def test_halves_on_overflow_and_forgets_good_steps(self):
        """A good step before an overflow does not count towards growth."""
        scaler = LossScaler(scale=8.0, growth_interval=2)
        for found_inf in (False, True, False):
            scaler.update(found_inf=found_inf)
        assert (scaler.scale, scaler.good_steps) == (4, 1)

    def test_stays_at_least_1(self):
        """Below 1, a scale would add underflow."""
        scaler = LossScaler(scale=2.0)
        for _ in range(3):
            scaler.update(found_inf=True)
        assert scaler.scale == 1

    def test_with_interval_1_grows_every_step(self):
        scaler = LossScaler(scale=1.0, growth_interval=1)
        for _ in range(3):
            scaler.update(found_inf=False)
        assert (scaler.scale, scaler.good_steps) == (8, 0)


class TestScaleLoss:
    """Exact scaling of a loss."""

    def test_keeps_every_bit_of_the_mantissa(self):
        """A power of two only changes the exponent."""
        loss = torch.tensor(1 / 3)
        scaled = LossScaler(scale=2.0**20).scale_loss(loss)
        assert torch.equal(scaled / 2.0**20, loss)

    def test_scales_the_gradient(self):
        param = torch.ones(2, requires_grad=True)
        LossScaler(scale=4.0).scale_loss((param * 3).sum()).backward()
        assert param.grad.tolist() == [12, 12]


class TestRefused:
    """Scales that would round, and impossible counts."""

    @pytest.mark.parametrize("scale", [0.0, -2.0, 0.5, 3.0, math.inf, math.nan])
    def test_scale_not_a_power_of_two(self, scale):
        with pytest.raises(UsageError, match=r"power of two.*Use 65536\.0"):
            LossScaler(scale=scale)

    @pytest.mark.parametrize("counts", [(0, 0), (2, 2), (2, -1)])
    def test_counts_out_of_range(self, counts):
        """A count at or above the interval would never double the scale."""
        growth_interval, good_steps = counts
        with pytest.raises(UsageError, match=r"growth_interval"):
            LossScaler(growth_interval=growth_interval, good_steps=good_steps)
