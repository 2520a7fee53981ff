"""Coverage of a run: the evidence that the reference's steps provide."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from zero_sim.errors import UntrainableError
from zero_sim.judge.guarantee import Guarantee
from zero_sim.judge.step_digests import StepDigests, guarantees_of
from zero_sim.judge.step_source import AnyStep
from zero_sim.reference import BoundedStep, NonFinite, ReferenceStep
from zero_sim.scenario.spec import Scenario

UNMOVED = "updates of params that rounding cancelled in every step"


class Coverage:
    """Accumulates coverage over the steps of a run.

    Args:
        scenario: The case, as replayed by the reference.
        first_step: The first judged step.
    """

    def __init__(self, scenario: Scenario, *, first_step: int) -> None:
        self._scenario = scenario
        self.taken_step = first_step - 1
        """The reference's last step."""
        self.nonzero_fraction_max = 0.0
        self.same_data = scenario.world.size > 1
        """True if all ranks had the same data in every step."""
        self.has_stepped = False
        """True if any step updated params on finite gradients. Other steps prove nothing."""
        self.guarantees: Counter[Guarantee] = Counter()
        """Reduced gradient elements over all steps, by guarantee."""
        self._unmoved: frozenset[str] | None = None
        """Params that kept their values in all steps; None before the first step."""

    @property
    def unobserved(self) -> frozenset[str]:
        """Updates that no step could show."""
        return frozenset({UNMOVED} if self._unmoved else ())

    def note(self, taken: AnyStep) -> None:
        """Add a step."""
        self.taken_step = taken.step
        self.nonzero_fraction_max = max(self.nonzero_fraction_max, taken.nonzero_fraction)
        # A param only counts as unmoved if it stays in every step.
        unmoved = frozenset(taken.unmoved)
        self._unmoved = unmoved if self._unmoved is None else self._unmoved & unmoved
        is_finite = math.isfinite(taken.norm)
        # Steps with infinite or NaN gradients prove nothing.
        if is_finite:
            self.guarantees += guarantees_of(taken, scenario=self._scenario)
        self.has_stepped |= not taken.skipped and is_finite
        self.same_data &= len(set(taken.data_digests.values())) == 1


def check_trainable(
    taken: ReferenceStep | BoundedStep | StepDigests,
    scenario: Scenario,
    *,
    world_ranks: Sequence[int],
) -> None:
    """Check that the reference took a step with finite numbers.

    If the reference cannot train a case, the case shows nothing about the system.

    Args:
        taken: The reference's step.
        scenario: The judged case.
        world_ranks: The group's world ranks, for messages.

    Raises:
        UntrainableError: If a gradient is not finite and the step is not skipped, or if a master is
            not finite and another step follows.
    """
    # Steps with overflow are skipped under loss scaling, or if the target declares it.
    may_skip = scenario.optimizer.loss_scale is not None or taken.skipped
    if taken.nonfinite is not None and not may_skip:
        raise UntrainableError(_of_gradient(taken.nonfinite, taken.step, scenario, world_ranks))
    # No step continues from the last master, so compare its overflow like any value.
    goes_on = taken.step + 1 < scenario.run.steps
    if goes_on and isinstance(taken, ReferenceStep) and taken.lost is not None:
        raise UntrainableError(
            "expected a case that the reference can train with finite numbers, got an infinite or "
            f"NaN master of param {taken.lost!r} after step {taken.step}. Try a smaller "
            f"optimizer.lr than {scenario.optimizer.lr:g}, or fewer run.steps."
        )


def _of_gradient(
    found: NonFinite, step: int, scenario: Scenario, world_ranks: Sequence[int]
) -> str:
    planted = scenario.data.nan
    # A planted NaN needs other advice than a diverging run.
    advice = (
        "data.nan plants it: set optimizer.loss_scale so that the step is skipped, choose a target "
        "that declares Numerics(nonfinite='skipped') or 'raises', or remove "
        "data.nan."
        if planted is not None and planted.step <= step
        else f"Try a smaller optimizer.lr than {scenario.optimizer.lr:g}, fewer run.steps, or "
        "optimizer.loss_scale, which skips such a step."
    )
    return (
        "expected a case that the reference can train with finite numbers, got "
        f"{found.value!r} in the local gradient of param {found.param!r}, element {found.index}, "
        f"of micro-batch {found.micro} of step {step} on rank {world_ranks[found.rank]}. {advice}"
    )
