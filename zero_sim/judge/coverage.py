"""Steps as the reference took them: how much they would have shown, and if they train at all."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from zero_sim.errors import UntrainableError
from zero_sim.judge.guarantee import Guarantee
from zero_sim.judge.step_digests import StepDigests, owed_by
from zero_sim.judge.step_source import AnyStep
from zero_sim.reference import BoundedStep, NonFinite, ReferenceStep
from zero_sim.scenario.spec import Scenario

UNMOVED = "updates of some params, all of which were rounded away"


class Coverage:
    """Sums up the steps that were taken.

    Args:
        scenario: The case, as the reference replays it.
        first_step: The first step that is judged.
    """

    def __init__(self, scenario: Scenario, *, first_step: int) -> None:
        self._scenario = scenario
        self.taken_step = first_step - 1
        """The last step that was taken."""
        self.nonzero_fraction_max = 0.0
        self.same_data = scenario.world.size > 1
        """True if all ranks saw the same data in every step."""
        self.has_stepped = False
        """True if any step was taken, and on finite gradients: others prove nothing."""
        self.owed: Counter[Guarantee] = Counter()
        """Elements of the reduced gradients of all steps, by why they are owed."""
        self._unmoved: frozenset[str] | None = None
        """Params that kept their values in all steps; None before the first one."""

    @property
    def unobserved(self) -> frozenset[str]:
        """Updates that no step could have shown."""
        return frozenset({UNMOVED} if self._unmoved else ())

    def note(self, taken: AnyStep) -> None:
        """Note a step."""
        self.taken_step = taken.step
        self.nonzero_fraction_max = max(self.nonzero_fraction_max, taken.nonzero_fraction)
        unmoved = frozenset(taken.unmoved)
        self._unmoved = unmoved if self._unmoved is None else self._unmoved & unmoved
        is_finite = math.isfinite(taken.norm)
        if is_finite:
            self.owed += owed_by(taken, scenario=self._scenario)
        self.has_stepped |= not taken.skipped and is_finite
        self.same_data &= len(set(taken.data_digests.values())) == 1


def check_trainable(
    taken: ReferenceStep | BoundedStep | StepDigests,
    scenario: Scenario,
    *,
    world_ranks: Sequence[int],
) -> None:
    """Check that the reference has taken a step with finite numbers.

    If it cannot train a case, no claim is made about a system.

    Args:
        taken: The step as the reference took it; one in digests is finite.
        scenario: The case that is judged.
        world_ranks: The ranks of the group, as messages name them.

    Raises:
        UntrainableError: A gradient is not finite and nothing skips the step, or a master is not
            finite that another step goes on from.
    """
    # With loss scaling, or where a target declares so, an overflow is expected to be skipped.
    may_skip = scenario.optimizer.loss_scale is not None or taken.skipped
    if taken.nonfinite is not None and not may_skip:
        raise UntrainableError(_of_gradient(taken.nonfinite, taken.step, scenario, world_ranks))
    # After the last step nothing goes on from a master, and an overflow is compared as any value.
    goes_on = taken.step + 1 < scenario.run.steps
    if goes_on and isinstance(taken, ReferenceStep) and taken.lost is not None:
        raise UntrainableError(
            "expected a case that the reference can train with finite numbers, got a master of "
            f"param {taken.lost!r} that is infinite or NaN after step {taken.step}. Try a smaller "
            f"optimizer.lr than {scenario.optimizer.lr:g}, or fewer run.steps."
        )


def _of_gradient(
    found: NonFinite, step: int, scenario: Scenario, world_ranks: Sequence[int]
) -> str:
    planted = scenario.data.nan
    advice = (
        "data.nan plants it: try optimizer.loss_scale, with which such a step is skipped, a target "
        "that skips it or raises and declares Numerics(nonfinite='skipped') or 'raises', or leave "
        "data.nan out."
        if planted is not None and planted.step <= step
        else f"Try a smaller optimizer.lr than {scenario.optimizer.lr:g}, fewer run.steps, or "
        "optimizer.loss_scale, with which such a step is skipped."
    )
    return (
        "expected a case that the reference can train with finite numbers, got "
        f"{found.value!r} in the local gradient of param {found.param!r}, element {found.index}, "
        f"of micro-batch {found.micro} of step {step} on rank {world_ranks[found.rank]}. {advice}"
    )
