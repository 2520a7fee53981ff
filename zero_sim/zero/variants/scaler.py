"""Dynamic loss scaling: a power of two that protects small gradients from underflow.

The loss is multiplied by the scale before backward, and the summed gradient is divided by it. Both
are exact unless something overflows or underflows. After an overflow the step is skipped and the
scale halved. After enough steps without overflow the scale doubles, to stay as high as possible.

Source: Micikevicius et al., "Mixed precision training", 2018, section 3.2. The growth rule follows
`torch.amp.GradScaler`, with factors of two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from zero_sim.errors import UsageError


@dataclass(kw_only=True, slots=True)
class LossScaler:
    """A rank's loss scale; equal on all ranks, because they agree on overflows.

    Checkpoints save its three fields.

    Raises:
        UsageError: If the scale is not a power of two or below 1, or a count is out of range.
    """

    scale: float = 65536.0
    """Factor for the next loss."""
    growth_interval: int = 2000
    """Consecutive steps without overflow before the scale doubles."""
    good_steps: int = 0
    """Steps without overflow since the scale last changed."""

    def __post_init__(self) -> None:
        # frexp returns a mantissa of exactly 0.5 for powers of two.
        if not (math.isfinite(self.scale) and self.scale >= 1 and math.frexp(self.scale)[0] == 0.5):
            raise UsageError(
                f"expected a loss scale that is a power of two and at least 1, so that scaling "
                f"does not round, got scale={self.scale}. Use 65536.0."
            )
        if self.growth_interval < 1 or not 0 <= self.good_steps < self.growth_interval:
            raise UsageError(
                f"expected growth_interval of at least 1 and good_steps below it, got "
                f"growth_interval={self.growth_interval}, good_steps={self.good_steps}."
            )

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale. Call backward on the result."""
        # Exact unless it overflows, because the scale is a power of two.
        return loss * self.scale

    def update(self, *, found_inf: bool) -> None:
        """Adapt the scale after a step.

        Args:
            found_inf: True if any rank's gradient had an infinity or NaN; equal on all ranks.
        """
        if found_inf:
            # The constructor requires at least 1.
            self.scale = max(self.scale / 2, 1.0)
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            # No upper limit is needed, because an overflow halves it again.
            self.scale *= 2
            self.good_steps = 0
