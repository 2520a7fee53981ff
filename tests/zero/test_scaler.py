"""Dynamic loss scaling: the scale alone."""

from __future__ import annotations

import math

import pytest
import torch

from zero_sim.errors import UsageError
from zero_sim.zero.variants.scaler import LossScaler


class TestUpdate:
    """The scale follows what happened."""

    def test_doubles_after_enough_good_steps_in_a_row(self):
        """And counts anew from there."""
        scaler = LossScaler(scale=8.0, growth_interval=2)
        seen = []
        for _ in range(5):
            scaler.update(found_inf=False)
            seen.append((scaler.scale, scaler.good_steps))
        assert seen == [(8, 1), (16, 0), (16, 1), (32, 0), (32, 1)]

    def test_halves_on_overflow_and_forgets_good_steps(self):
        """One good step before an overflow does not count towards growth."""
        scaler = LossScaler(scale=8.0, growth_interval=2)
        for found_inf in (False, True, False):
            scaler.update(found_inf=found_inf)
        assert (scaler.scale, scaler.good_steps) == (4, 1)

    def test_stays_at_least_1(self):
        """Below 1 it would lose what it is there to keep."""
        scaler = LossScaler(scale=2.0)
        for _ in range(3):
            scaler.update(found_inf=True)
        assert scaler.scale == 1

    def test_with_interval_1_grows_every_step(self):
        """The shortest interval there is."""
        scaler = LossScaler(scale=1.0, growth_interval=1)
        for _ in range(3):
            scaler.update(found_inf=False)
        assert (scaler.scale, scaler.good_steps) == (8, 0)


class TestScaleLoss:
    """Scaling a loss is exact."""

    def test_keeps_every_bit_of_the_mantissa(self):
        """A power of two moves the exponent only."""
        loss = torch.tensor(1 / 3)
        scaled = LossScaler(scale=2.0**20).scale_loss(loss)
        assert torch.equal(scaled / 2.0**20, loss)

    def test_scales_the_gradient(self):
        """Backward sees the scale as the incoming gradient."""
        param = torch.ones(2, requires_grad=True)
        LossScaler(scale=4.0).scale_loss((param * 3).sum()).backward()
        assert param.grad.tolist() == [12, 12]


class TestRefused:
    """A scale that would round, or a count that cannot be."""

    @pytest.mark.parametrize("scale", [0.0, -2.0, 0.5, 3.0, math.inf, math.nan])
    def test_scales_that_are_no_powers_of_two_from_1(self, scale):
        """With what to try."""
        with pytest.raises(UsageError, match=r"power of two.*Use 65536\.0"):
            LossScaler(scale=scale)

    @pytest.mark.parametrize("counts", [(0, 0), (2, 2), (2, -1)])
    def test_counts_out_of_range(self, counts):
        """A count at the interval or past it would never double the scale."""
        growth_interval, good_steps = counts
        with pytest.raises(UsageError, match=r"growth_interval"):
            LossScaler(growth_interval=growth_interval, good_steps=good_steps)
