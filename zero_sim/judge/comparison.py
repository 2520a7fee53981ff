"""The comparison with the reference, one seam whether the order of addition is known or not.

Where the order is known, the reference tells the bits of all there is (`judge.exact`). Where
it is not, sums owe a place between two numbers, and all that follows from them its bits
(`judge.bounded`). A judge knows no difference between the two.
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
from zero_sim.targets import CompletedEngine, OwnedPart, StepResult
from zero_sim.targets.adapt import GRADIENTS
from zero_sim.workloads import Workload

_DIFFERS = Finding(check=Check.EQUALITY_PARAMS, message="not as another process has it")


class DigestComparison:
    """Compares a group with digests of steps that another process takes; as `Comparing`.

    Digests show that all is as expected, or that something may not be, and never how it differs. So
    its findings are bare: they only make the judge fall back to a reference of this process's own.

    Args:
        group: The judged group, and what is known of it.
        steps: Digests of the steps that ranks are compared with.
    """

    def __init__(self, group: JudgedGroup, *, steps: Mapping[int, StepDigests]) -> None:
        self._group = group
        self._steps = steps

    def compare_measured(self, result: StepResult, *, rank: int, step: int) -> Iterator[Finding]:
        """Compare norm and zeros; the norm only if every order of addition gives it."""
        expected = self._steps[step]
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
            if self._group.telling[rank]:
                yield _DIFFERS
            else:
                self._group.unobserved.add(GRADIENTS)
        yield from self._compare(expected, part.master, "master", *at)
        if expected.state_keys.get(place.param) != sorted(part.state):
            yield _DIFFERS
        for name, value in part.state.items():
            yield from self._compare(expected, value, "state", *at, name)

    def compare_reported(
        self, engine: CompletedEngine, *, rank: int, step: int
    ) -> Iterator[Finding]:
        """Compare gradients of whole params, if the target declares that it reports them."""
        expected = self._steps[step]
        self._group.note_unreported(divisor=expected.divisor)
        if not self._group.shows_grads_of_params:
            return
        reported = engine.gradients()
        for name in self._group.ownership.held[rank]:
            key = key_of("whole grad", name)
            if name in reported and key in expected.digests:
                yield from self._compare(expected, reported[name], "whole grad", name)
            elif key in expected.digests and key not in expected.zero_grads:
                yield _DIFFERS

    def scale_names(self, step: int) -> Sequence[str]:
        """Return the names of params in fp8."""
        return self._steps[step].scale_names

    def compare_scales(
        self, scales: Mapping[str, Tensor | None], *, rank: int, step: int
    ) -> Iterator[Finding]:
        """Compare the scales of params in fp8."""
        for name, scale in scales.items():
            if scale is None:
                yield _DIFFERS
            else:
                yield from self._compare(self._steps[step], scale, "scale", name)

    def compare_params(
        self, params: Mapping[str, Tensor], *, rank: int, step: int
    ) -> Iterator[Finding]:
        """Compare the working params that a rank holds, those that others own included."""
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
        self._group.comparer.elems += got.numel()


AnyReference = Reference | BoundedReference


class Comparing(Protocol):
    """What one group of ranks owes after a step.

    In all methods `rank` is a rank within the judged group, and `step` the index of a step that was
    taken, from 0. What is compared is as the engine of that rank shows it, by the names of params.
    """

    def compare_measured(self, result: StepResult, *, rank: int, step: int) -> Iterator[Finding]:
        """Compare what was measured of the whole gradient."""
        ...

    def compare_losses(
        self, losses: Sequence[Tensor], *, reads: ForwardReads | None, rank: int, step: int
    ) -> Iterator[Finding]:
        """Compare a rank's losses, and if one differs the params that its forward read."""
        ...

    def compare_part(self, part: OwnedPart, *, rank: int, step: int) -> Iterator[Finding]:
        """Compare a part that a rank owns: its gradient, its master, its optimizer state."""
        ...

    def compare_reported(
        self, engine: CompletedEngine, *, rank: int, step: int
    ) -> Iterator[Finding]:
        """Compare gradients of whole params, where the target declares that it shows them."""
        ...

    def scale_names(self, step: int) -> Iterable[str]:
        """Return the names of params in fp8."""
        ...

    def compare_scales(
        self, scales: Mapping[str, Tensor | None], *, rank: int, step: int
    ) -> Iterator[Finding]:
        """Compare the scales of params in fp8; None for one that the rank has not."""
        ...

    def compare_params(
        self, params: Mapping[str, Tensor], *, rank: int, step: int
    ) -> Iterator[Finding]:
        """Compare the working params that a rank holds, those that others own included."""
        ...


class Comparison(Comparing, Protocol):
    """The same with a reference of this process, which knows more than digests."""

    def compare_loaded(self, engine: CompletedEngine, *, rank: int) -> Iterator[Finding]:
        """Compare all that a rank goes on with after a load, before its first step."""
        ...

    def note_agreed(self, part: OwnedPart, *, rank: int, step: int) -> None:
        """Note a part that agreed with a step from elsewhere."""
        ...

    def forget(self, step: int) -> None:
        """Forget a step that every rank was compared with."""
        ...

    def add_to(self, judged: JudgeReport) -> JudgeReport:
        """Return what was seen of a run with what only this knows."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Owed:
    """Expected steps of a group, and the comparisons with them."""

    steps: Steps
    exact: Comparison
    """Comparison with steps of a reference of this process."""
    digests: Comparing | None = None
    """Comparison with digests; None if the group has none."""

    @property
    def comparison(self) -> Comparing:
        """The comparison for the steps as they are now."""
        if self.digests is None or not self.steps.has_digests:
            return self.exact
        return self.digests


def owed_of(
    group: JudgedGroup,
    *,
    reference: AnyReference | LateReference,
    order_seed: int,
    shared: SharedSteps | None = None,
) -> Owed:
    """Return what a group owes by a reference.

    Args:
        group: The judged group, and what is known of it.
        reference: The oracle, at the step before the first one.
        order_seed: Seed of the world, from which orders are drawn.
        shared: Steps of references elsewhere; None to take all steps here.
    """
    if isinstance(reference, BoundedReference):
        bounded = BoundedComparison(group, reference=reference)
        return Owed(steps=bounded, exact=bounded)
    source = StepSource(group, reference=reference, order_seed=order_seed, shared=shared)
    return Owed(
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
    """Build the reference that fits what is known of the order, or go on with the one there is.

    Args:
        scenario: The case, as the reference is to replay it.
        before: The reference of the world before this one, if there was one.
        workload: The case's workload.
        uncounted: As for `Reference`.
        elsewhere: As for `Reference`.
        weights_only: As for `Reference.continue_as`.
        rules: As for `Reference`; where the order is not known, of these only how it clips is read,
            which is no form that takes the root.

    Raises:
        ModelError: The model has nothing to train.
        UsageError: The reference cannot go on in this world.
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
            "expected a known order of addition in a case that goes on in another world, got "
            "world.order_known = false. Try leaving out one of the two."
        )
    before.continue_as(scenario, workload=workload, weights_only=weights_only, rules=rules)
    return before
