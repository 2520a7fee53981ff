"""Observers of a rank's training loop, selected once per case."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from zero_sim.targets import StepResult


class Observer:
    """Base of all observers: one method per moment of the loop, each a no-op here.

    Steps and micro-batches count from 0. The loop calls a rank's observers one after another, in
    the order of their selection; `updating` blocks are nested.
    """

    # Otherwise subclasses with slots would have a `__dict__` as well.
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
            step: Index of the step.
            trained: Loss of the first micro-batch. # 0D
            evaluated: Loss of the same micro-batch under `no_grad`. # 0D
        """

    def before_forward(self, step: int, micro: int) -> None:
        """Run before a forward, after its batch is drawn."""

    def after_forward(self, step: int) -> None:
        """Run between a forward and its backward."""

    def updating(self, step: int) -> AbstractContextManager[object] | None:
        """Return a context manager around the optimizer's step; None for none."""
        return None

    def after_step(self, step: int, losses: Sequence[Tensor], result: StepResult) -> None:
        """Run after the optimizer's step; params may still be in flight.

        Args:
            step: Index of the step.
            losses: Loss of each micro-batch with data on this rank.
            result: Returned by the engine.
        """

    def after_gather(self, step: int) -> None:
        """Run once the working params of a step are complete."""

    def at_end(self, step: int) -> None:
        """Run after the last step of the case; `step` is its index."""
