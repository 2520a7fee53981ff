"""Base class for observers of a rank's training loop."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from zero_sim.targets import StepResult


class Observer:
    """Base of all observers, with a method per moment of the loop. All methods are no-ops.

    Steps and micro-batches count from 0. The loop calls a rank's observers in the order of their
    selection; `updating` blocks are nested.
    """

    # Without this, subclasses with slots would still have a `__dict__`.
    __slots__ = ()

    def before_backward(self, step: int) -> None:
        """Run before the first micro-batch of a step, after `zero_grad`."""

    def before_micro_batch(self, step: int, micro: int) -> None:
        """Run before a micro-batch, even if the rank has no data for it."""

    def before_evaluation(self, step: int) -> None:
        """Run before a forward under `no_grad`, which is not part of training."""

    def after_evaluation(self, step: int, trained: Tensor, evaluated: Tensor) -> None:
        """Run after the last backward of a step with a forward under `no_grad`.

        Args:
            step: Step index.
            trained: Training loss in the first micro-batch. # 0D
            evaluated: Loss in the same micro-batch under `no_grad`. # 0D
        """

    def before_forward(self, step: int, micro: int) -> None:
        """Run before a forward, after its batch is drawn."""

    def after_forward(self, step: int) -> None:
        """Run between a forward and its backward."""

    def updating(self, step: int) -> AbstractContextManager[object] | None:
        """Return a context manager to enter around the optimizer's step, or None."""
        return None

    def after_step(self, step: int, losses: Sequence[Tensor], result: StepResult) -> None:
        """Run after the optimizer's step. Params may still be in flight.

        Args:
            step: Step index.
            losses: Losses of this rank's micro-batches with data.
            result: Result from the engine's step.
        """

    def after_gather(self, step: int) -> None:
        """Run when a step's working params are complete."""

    def at_end(self, step: int) -> None:
        """Run after the case's last step."""
