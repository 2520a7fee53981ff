"""Losses that ranks share: what a mean over the rows of one rank is in a mean over ranks."""

from __future__ import annotations

from torch import Tensor

from zero_sim.scenario.spec import Scenario


def share_of(loss: Tensor, *, scenario: Scenario) -> Tensor:
    """Return the loss that a rank runs backward from, where that is a mean or a part of one.

    Args:
        loss: Mean over the rank's rows, 0D.
        scenario: A case without a summed loss.
    """
    if scenario.data.loss == "mean":
        return loss
    # A tensor: by a Python number some devices multiply with its rounded reciprocal.
    return loss / loss.new_full((), scenario.world.size)
