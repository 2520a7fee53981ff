"""Factors of losses: dynamic scales, and means that a system takes before backward.

A dynamic scale is a power of two, so that scaling itself changes no bit of a gradient. The factor
of a mean, such as 1 / tokens, is rounded like any number.
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

_SCALE_MIN = 1.0

ScaleLoss = Literal["micro-batches", "tokens", "cp", "1/cp"]
"""Factor of each loss before its backward: 1 / micro-batches; ranks / tokens of the step; or the
number of context-parallel ranks, or its reciprocal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossRows:
    """Rows (samples or tokens) of one micro-batch and of its step, which its loss is scaled by.

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
    """Micro-batches of a step (`run.micro_batches`), including those a rank has no data for."""
    world_size: int
    """Number of data-parallel ranks, including context parallelism."""
    cp: int = 1
    """Number of context-parallel ranks among them (`topology.cp`)."""


ScaleLossFunction = Callable[[LossRows], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossFactors:
    """Numbers by which the terms of a loss are multiplied before backward."""

    main: float
    second: float | None = None
    """That of a second term; None for the sum of both times `main`."""

    def scaled(self, terms: Sequence[Tensor]) -> Tensor:
        """Return the scaled loss, 0-D.

        Args:
            terms: Main loss, and the second one of a model that has it, each 0-D.
        """
        if self.second is None or len(terms) == 1:
            return total_loss(terms) * self.main
        return terms[0] * self.main + terms[1] * self.second


def loss_factor(
    rule: ScaleLoss | ScaleLossFunction, at: LossRows, *, declared: str = "scale_loss"
) -> float:
    """Return what a loss is multiplied by before its backward.

    Args:
        rule: A name, or a pure function of the target.
        at: The micro-batch.
        declared: Field of `Numerics` that has the rule.

    Raises:
        UsageError: The function returns no finite number.
    """
    if rule == "micro-batches":
        return 1 / at.micro_batches
    if rule == "tokens":
        return at.world_size / at.step_rows
    if rule == "cp":
        return at.cp
    if rule == "1/cp":
        return 1 / at.cp
    assert callable(rule)
    factor = rule(at)
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not isfinite(factor):
        raise UsageError(
            f"expected the function Numerics.{declared} to return a finite number, got {factor!r} "
            f"for {at}. Return a float, such as 1 / rows.step_rows."
        )
    return factor


class LossScale:
    """What losses are multiplied by; it halves after an overflow and doubles after good steps."""

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
        """Adapt the scale after a step whose reduced gradient was finite or not."""
        if not finite:
            self.scale, self._good_steps = max(self.scale / 2, _SCALE_MIN), 0
            return
        self._good_steps += 1
        if self._good_steps == self._growth_interval:
            self.scale, self._good_steps = self.scale * 2, 0
