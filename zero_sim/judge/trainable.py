"""Trainability of a case: where the reference cannot train it, nothing is said of a system."""

from __future__ import annotations

from collections.abc import Sequence

from zero_sim.errors import UntrainableError
from zero_sim.judge.step_digests import StepDigests
from zero_sim.reference import BoundedStep, NonFinite, ReferenceStep
from zero_sim.scenario.spec import Scenario


def check_trainable(
    taken: ReferenceStep | BoundedStep | StepDigests,
    scenario: Scenario,
    *,
    world_ranks: Sequence[int],
) -> None:
    """Check that the reference has taken a step with finite numbers.

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
        "that skips it and declares Numerics(nonfinite='skipped'), or leave data.nan out."
        if planted is not None and planted.step <= step
        else f"Try a smaller optimizer.lr than {scenario.optimizer.lr:g}, fewer run.steps, or "
        "optimizer.loss_scale, with which such a step is skipped."
    )
    return (
        "expected a case that the reference can train with finite numbers, got "
        f"{found.value!r} in the local gradient of param {found.param!r}, element {found.index}, "
        f"of micro-batch {found.micro} of step {step} on rank {world_ranks[found.rank]}. {advice}"
    )
