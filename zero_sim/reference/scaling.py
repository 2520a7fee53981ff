"""Loss factors: dynamic scales, and means taken before backward.

A dynamic scale is a power of two, so multiplying by it does not round. A mean's factor, such as 1 /
tokens, does.
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
"""Loss factor before backward: 1 / micro-batches, ranks / step tokens, context-parallel ranks, or 1
/ context-parallel ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossRows:
    """Row counts (samples or tokens) from which a micro-batch's loss is scaled.

    Example:
        >>> LossRows(rows=2, rank_rows=4, step_rows=10, micro_batches=2, world_size=3).step_rows
        10
    """

    rows: int
    """Rows in this micro-batch."""
    rank_rows: int
    """Rows in the step on this rank."""
    step_rows: int
    """Rows in the step on all ranks."""
    micro_batches: int
    """Micro-batches per step (`run.micro_batches`), including any for which a rank has no data."""
    world_size: int
    """Number of data-parallel ranks, including context parallelism."""
    cp: int = 1
    """Number of context-parallel ranks among them (`topology.cp`)."""


ScaleLossFunction = Callable[[LossRows], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossFactors:
    """Factors for loss terms, applied before backward."""

    main: float
    second: float | None = None
    """Factor for a second term; None to multiply the sum by `main`."""

    def scaled(self, terms: Sequence[Tensor]) -> Tensor:
        """Return the scaled loss from one or two terms, each 0-D."""
        if self.second is None or len(terms) == 1:
            # Add first, because scaling each term would round differently.
            return total_loss(terms) * self.main
        return terms[0] * self.main + terms[1] * self.second


def loss_factor(
    rule: ScaleLoss | ScaleLossFunction, at: LossRows, *, declared: str = "scale_loss"
) -> float:
    """Return a loss factor.

    Args:
        rule: Name, or the target's own pure function.
        at: The micro-batch.
        declared: `Numerics` field with the rule, for messages.

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
    """Dynamic loss scale. Halved after an overflow, doubled after `growth_interval` good steps."""

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
