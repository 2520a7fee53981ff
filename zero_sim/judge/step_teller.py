"""The teller of steps: in the process whose reference the others hear of, what it tells them."""

from __future__ import annotations

from collections.abc import Sequence

from zero_sim.judge.judged_group import JudgedGroup
from zero_sim.judge.step_digests import StepDigests, StepWire, digests_of
from zero_sim.reference import BoundedStep, ReferenceStep


class StepTeller:
    """Tells step after step, until digests are not enough for one.

    Args:
        wire: Where they are told.
    """

    def __init__(self, wire: StepWire) -> None:
        self._wire = wire
        self._is_over = False
        """Whether the others go on by themselves."""

    def begin(self, step: int) -> None:
        """Say that a step is being computed.

        Args:
            step: Index of the step, from 0.
        """
        if not self._is_over:
            self._wire.begin(step)

    def tell(
        self,
        taken: Sequence[ReferenceStep | BoundedStep | StepDigests],
        *,
        groups: Sequence[JudgedGroup],
    ) -> None:
        """Tell what a step owes, or that everybody has to compute that.

        Args:
            taken: The step, of every group that shares a norm, as the reference has just taken it.
            groups: The groups, in the same order.
        """
        if self._is_over:
            return
        owed = [
            digests_of(each, group=group)
            for each, group in zip(taken, groups, strict=True)
            if isinstance(each, ReferenceStep)
        ]
        told = [each.as_dict() for each in owed if each is not None]
        if len(told) == len(groups):
            self._wire.tell(taken[0].step, told)
        else:
            self.stop(taken[0].step)

    def stop(self, step: int) -> None:
        """Let the others go on by themselves.

        Args:
            step: The first step that they are not told of.
        """
        if not self._is_over:
            self._is_over = True
            self._wire.begin(step)
            self._wire.tell(step, None)
