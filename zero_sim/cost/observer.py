"""Observers: objects that watch a rank's training loop, chosen once from the case."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from zero_sim.targets import StepResult


class Observer:
    """Base of all observers: a method for each moment of the loop, which does nothing here.

    Steps and micro-batches are numbered from 0. Except in `updating` the loop calls the observers
    of a rank one after another, in the order in which they were chosen.
    """

    __slots__ = ()

    def before_backward(self, step: int) -> None:
        """Watch before the first micro-batch of a step, after `zero_grad`."""

    def before_micro_batch(self, step: int, micro: int) -> None:
        """Watch before a micro-batch, whether or not the rank has data for it."""

    def before_evaluation(self, step: int) -> None:
        """Watch before a forward under `no_grad`, which is no part of the training."""

    def after_evaluation(self, step: int, trained: Tensor, evaluated: Tensor) -> None:
        """Watch after the last backward of a step in which a forward ran under `no_grad`.

        Args:
            step: Index of the step.
            trained: Loss of the first micro-batch. # 0D
            evaluated: Loss of the same micro-batch under `no_grad`. # 0D
        """

    def before_forward(self, step: int, micro: int) -> None:
        """Watch before a forward; the batch is drawn."""

    def after_forward(self, step: int) -> None:
        """Watch between a forward and its backward."""

    def updating(self, step: int) -> AbstractContextManager[object] | None:
        """Return a block around the step of the optimizer; None for no block."""
        return None

    def after_step(self, step: int, losses: Sequence[Tensor], result: StepResult) -> None:
        """Watch after the step of the optimizer; params may still be in flight.

        Args:
            step: Index of the step.
            losses: Loss of each micro-batch that the rank had data for.
            result: Returned by the engine.
        """

    def after_gather(self, step: int) -> None:
        """Watch once the working params of a step are there."""

    def at_end(self, step: int) -> None:
        """Watch after the last step of the case, which this is the index of."""
