"""Comparison with the reference, by one protocol for known and unknown orders of addition.

With a known order, the reference computes all bits (`judge.exact`). With an unknown order, sums
must lie in proven intervals, and everything after them must match bit for bit (`judge.bounded`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from zero_sim.errors import UsageError
from zero_sim.findings.records import Finding
from zero_sim.judge.bounded import BoundedComparison
from zero_sim.judge.exact import ExactComparison
from zero_sim.judge.forward_reads import ForwardReads
from zero_sim.judge.judge_report import JudgeReport
from zero_sim.judge.judged_group import JudgedGroup
from zero_sim.judge.step_digests import StepDigests, key_of
from zero_sim.judge.step_source import SharedSteps, Steps, StepSource
from zero_sim.judge.trajectory import LateReference
from zero_sim.reference import (
    BoundedReference,
    Reference,
    Rules,
)
from zero_sim.scenario.checks import Check
from zero_sim.scenario.spec import Scenario
from zero_sim.targets import EngineAdapter, OwnedPart, StepResult
from zero_sim.targets.adapt import GRADIENTS
from zero_sim.workloads import Workload

# Digests show that a tensor may differ, but not how. So this finding has no content. It only makes
# the judge fall back to a reference in this process, which compares element by element.
_DIFFERS = Finding(check=Check.EQUALITY_PARAMS, message="differs from another process")


class DigestComparison:
    """Compares a group with digests of steps that another process computed.

    Args:
        group: The judged group.
        steps: Digests of expected steps.
    """

    def __init__(self, group: JudgedGroup, *, steps: Mapping[int, StepDigests]) -> None:
        self._group = group
        self._steps = steps

    def compare_measured(self, result: StepResult, *, rank: int, step: int) -> Iterator[Finding]:
        """Compare norm and zeros."""
        expected = self._steps[step]
        # A norm that depends on the order of addition has no digest.
        if result.norm is not None and key_of("norm") in expected.digests:
            yield from self._compare(expected, result.norm, "norm")
        if result.zeros is not None and result.zeros != expected.zeros:
            yield _DIFFERS

    def compare_losses(
        self, losses: Sequence[Tensor], *, reads: object, rank: int, step: int
    ) -> Iterator[Finding]:
        """Compare the losses of all micro-batches."""
        for micro, loss in enumerate(losses):
            yield from self._compare(self._steps[step], loss, "loss", rank, micro)

    def compare_part(self, part: OwnedPart, *, rank: int, step: int) -> Iterator[Finding]:
        """Compare a part's gradient, master and optimizer state."""
        expected, place = self._steps[step], part.place
        at = (place.param, place.start, place.stop)
        key = key_of("grad", *at)
        if part.grad is not None and key in expected.digests:
            yield from self._compare(expected, part.grad, "grad", *at)
        elif key in expected.digests and key not in expected.zero_grads:
            # The engine lacks this gradient, or reports no gradients.
            if self._group.reporting[rank]:
                yield _DIFFERS
            else:
                self._group.unobserved.add(GRADIENTS)
        yield from self._compare(expected, part.master, "master", *at)
        # The loop below does not visit missing keys.
        if expected.state_keys.get(place.param) != sorted(part.state):
            yield _DIFFERS
        for name, value in part.state.items():
            yield from self._compare(expected, value, "state", *at, name)

    def compare_reported(self, engine: EngineAdapter, *, rank: int, step: int) -> Iterator[Finding]:
        """Compare gradients of whole params, if the target declares that it reports them."""
        expected = self._steps[step]
        self._group.note_unreported(divisor=expected.divisor)
        if not self._group.shows_grads_of_params:
            return
        reported = engine.gradients()
        # Only params that this rank trains, because it lacks the experts of other ranks.
        for name in self._group.ownership.held[rank]:
            key = key_of("whole grad", name)
            if name in reported and key in expected.digests:
                yield from self._compare(expected, reported[name], "whole grad", name)
            elif key in expected.digests and key not in expected.zero_grads:
                yield _DIFFERS

    def scale_names(self, step: int) -> Sequence[str]:
        """Return the names of fp8 params."""
        return self._steps[step].scale_names

    def compare_scales(
        self, scales: Mapping[str, Tensor | None], *, rank: int, step: int
    ) -> Iterator[Finding]:
        """Compare the scales of fp8 params."""
        for name, scale in scales.items():
            if scale is None:
                # An fp8 param has no value without its scale.
                yield _DIFFERS
            else:
                yield from self._compare(self._steps[step], scale, "scale", name)

    def compare_params(
        self, params: Mapping[str, Tensor], *, rank: int, step: int
    ) -> Iterator[Finding]:
        """Compare all working params that a rank holds, including those of other owners."""
        expected = self._steps[step]
        for name in self._group.ownership.held[rank]:
            if name in params:
                yield from self._compare(expected, params[name], "param", name)
            elif key_of("param", name) in expected.digests:
                yield _DIFFERS

    def _compare(
        self, expected: StepDigests, got: Tensor, what: str, *where: object
    ) -> Iterator[Finding]:
        if not expected.agrees(got, what, *where):
            yield _DIFFERS
        # Count even if it differs: falling back restores the count.
        self._group.comparer.elems += got.numel()


AnyReference = Reference | BoundedReference


class Comparing(Protocol):
    """Comparison of a group's state after a step.

    In all methods, `rank` is a group rank and `step` counts from 0. Mappings have param names as
    keys.
    """

    def compare_measured(self, result: StepResult, *, rank: int, step: int) -> Iterator[Finding]:
        """Compare norm and zeros of the whole gradient."""
        ...

    def compare_losses(
        self, losses: Sequence[Tensor], *, reads: ForwardReads | None, rank: int, step: int
    ) -> Iterator[Finding]:
        """Compare a rank's losses. If a loss differs, also compare the params its forward read."""
        ...

    def compare_part(self, part: OwnedPart, *, rank: int, step: int) -> Iterator[Finding]:
        """Compare an owned part: gradient, master and optimizer state."""
        ...

    def compare_reported(self, engine: EngineAdapter, *, rank: int, step: int) -> Iterator[Finding]:
        """Compare gradients of whole params, if the target declares that it reports them."""
        ...

    def scale_names(self, step: int) -> Iterable[str]:
        """Return the names of fp8 params."""
        ...

    def compare_scales(
        self, scales: Mapping[str, Tensor | None], *, rank: int, step: int
    ) -> Iterator[Finding]:
        """Compare the scales of fp8 params. A scale is None if the rank lacks it."""
        ...

    def compare_params(
        self, params: Mapping[str, Tensor], *, rank: int, step: int
    ) -> Iterator[Finding]:
        """Compare all working params that a rank holds, including those of other owners."""
        ...


class Comparison(Comparing, Protocol):
    """Comparison with a reference in this process, so with tensors instead of digests."""

    def compare_loaded(self, engine: EngineAdapter, *, rank: int) -> Iterator[Finding]:
        """Compare a rank's loaded state, before its first step."""
        ...

    def note_agreed(self, part: OwnedPart, *, rank: int, step: int) -> None:
        """Record a part that agreed with a shared step."""
        ...

    def forget(self, step: int) -> None:
        """Drop a step after all ranks were compared."""
        ...

    def add_to(self, judged: JudgeReport) -> JudgeReport:
        """Add results of this comparison to a report."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedSteps:
    """Expected steps of a group, and comparisons with them."""

    steps: Steps
    exact: Comparison
    digests: Comparing | None = None
    """Comparison with digests; None if the group has none."""

    @property
    def comparison(self) -> Comparing:
        """The comparison for the current kind of steps."""
        # After a fallback to the group's own reference, steps are no longer digests.
        if self.digests is None or not self.steps.has_digests:
            return self.exact
        return self.digests


def expected_steps_of(
    group: JudgedGroup,
    *,
    reference: AnyReference | LateReference,
    order_seed: int,
    shared: SharedSteps | None = None,
) -> ExpectedSteps:
    """Build the expected steps and comparisons of a group.

    Args:
        group: The judged group.
        reference: The oracle, before the first step.
        order_seed: World seed, from which orders are drawn.
        shared: Steps of references elsewhere; None to take all steps here.
    """
    # With an unknown order, steps depend on this system's sums, so they cannot be shared.
    if isinstance(reference, BoundedReference):
        bounded = BoundedComparison(group, reference=reference)
        return ExpectedSteps(steps=bounded, exact=bounded)
    source = StepSource(group, reference=reference, order_seed=order_seed, shared=shared)
    return ExpectedSteps(
        steps=source,
        exact=ExactComparison(group, source=source),
        digests=DigestComparison(group, steps=source.steps),
    )


def take_reference(
    scenario: Scenario,
    *,
    before: AnyReference | None,
    workload: Workload,
    uncounted: Sequence[str] = (),
    elsewhere: Sequence[str] = (),
    weights_only: bool = False,
    rules: Rules | None = None,
) -> AnyReference:
    """Build the reference for a world, or continue with the previous world's.

    Args:
        scenario: The case, as replayed by the reference.
        before: Reference of the previous world; None in the first world.
        workload: The case's workload.
        uncounted: As for `Reference`.
        elsewhere: As for `Reference`.
        weights_only: As for `Reference.continue_as`.
        rules: As for `Reference` or `BoundedReference`.

    Raises:
        ModelError: If the model has no trained params.
        UsageError: If the reference cannot continue in this world.
    """
    if before is None:
        if scenario.world.order_known:
            return Reference(
                scenario,
                workload=workload,
                uncounted=uncounted,
                elsewhere=elsewhere,
                rules=rules,
            )
        return BoundedReference(scenario, workload=workload, rules=rules)
    if isinstance(before, BoundedReference):
        raise UsageError(
            "expected a known order of addition, because the case continues in another world, got "
            "world.order_known = false. Remove one of the two."
        )
    # The oracle keeps its own state. The system loads a checkpoint.
    before.continue_as(scenario, workload=workload, weights_only=weights_only, rules=rules)
    return before
