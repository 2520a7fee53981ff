"""Factors of losses: dynamic scales, and means that a system takes before backward.

A dynamic scale is a power of two, so it changes no bit of a gradient. The factor of a mean, such as
1 / tokens, is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Literal

from torch import Tensor

from zero_sim.errors import UsageError
from zero_sim.scenario.spec import LossScaleSpec
from zero_sim.workloads import total_loss

# The scale never falls below 1.
_SCALE_MIN = 1.0

ScaleLoss = Literal["micro-batches", "tokens", "cp", "1/cp"]
"""Factor of each loss before its backward: 1 / micro-batches, or ranks / tokens of the step, or the
number of context-parallel ranks, or its reciprocal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossRows:
    """Rows (samples or tokens) of a micro-batch and of its step, for scaling its loss.

    Example:
        >>> LossRows(rows=2, rank_rows=4, step_rows=10, micro_batches=2, world_size=3).step_rows
        10
    """

    rows: int
    """Rows of this micro-batch."""
    rank_rows: int
    """Rows of all micro-batches of this rank in the step."""
    step_rows: int
    """Rows of all micro-batches of all ranks in the step."""
    micro_batches: int
    """Micro-batches of a step (`run.micro_batches`), including any without data on a rank."""
    world_size: int
    """Number of data-parallel ranks, including context parallelism."""
    cp: int = 1
    """Number of context-parallel ranks among them (`topology.cp`)."""


ScaleLossFunction = Callable[[LossRows], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossFactors:
    """Factors of the terms of a loss, applied before backward."""

    main: float
    second: float | None = None
    """Factor of a second term; None to multiply the sum of both by `main`."""

    def scaled(self, terms: Sequence[Tensor]) -> Tensor:
        """Return the scaled loss, 0-D.

        Args:
            terms: The main loss, and a second one if the model has it, each 0-D.
        """
        if self.second is None or len(terms) == 1:
            # The sum first, because products of each term would round differently.
            return total_loss(terms) * self.main
        return terms[0] * self.main + terms[1] * self.second


def loss_factor(
    rule: ScaleLoss | ScaleLossFunction, at: LossRows, *, declared: str = "scale_loss"
) -> float:
    """Return the factor of a loss before its backward.

    Args:
        rule: A name, or a pure function of the target.
        at: The micro-batch.
        declared: Field of `Numerics` that holds the rule.

    Raises:
        UsageError: The function returns no finite number.
    """
    if rule == "micro-batches":
        return 1 / at.micro_batches
    if rule == "tokens":
        # Times world size, because averaging over ranks divides by it.
        return at.world_size / at.step_rows
    if rule == "cp":
        return at.cp
    if rule == "1/cp":
        return 1 / at.cp
    # All other rules are functions.
    assert callable(rule)
    factor = rule(at)
    # bool is an int in Python, but a mistake here.
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not isfinite(factor):
        raise UsageError(
            f"expected the function Numerics.{declared} to return a finite number, got {factor!r} "
            f"for {at}. Return a float, such as 1 / rows.step_rows."
        )
    return factor


class LossScale:
    """Dynamic factor of losses. Halves after an overflow, doubles after a number of good steps."""

    def __init__(self, spec: LossScaleSpec) -> None:
        """Start with the spec's scale."""
        self.scale = spec.initial
        self._growth_interval = spec.growth_interval
        self._good_steps = 0

    @property
    def good_steps(self) -> int:
        """Steps without overflow since the scale last changed."""
        return self._good_steps

    def update(self, *, finite: bool) -> None:
        """Adapt the scale after a step with finite or overflowed gradients."""
        if not finite:
            self.scale, self._good_steps = max(self.scale / 2, _SCALE_MIN), 0
            return
        self._good_steps += 1
        if self._good_steps == self._growth_interval:
            self.scale, self._good_steps = self.scale * 2, 0
