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
from zero_sim.judge.by_digest import DigestComparison
from zero_sim.judge.exact import ExactComparison
from zero_sim.judge.forward_reads import ForwardReads
from zero_sim.judge.judge_report import JudgeReport
from zero_sim.judge.judged_group import JudgedGroup
from zero_sim.judge.step_source import SharedSteps, Steps, StepSource
from zero_sim.judge.trajectory import LateReference
from zero_sim.reference import (
    BoundedReference,
    Reference,
    Rules,
)
from zero_sim.scenario.spec import Scenario
from zero_sim.targets import CompletedEngine, OwnedPart, StepResult
from zero_sim.workloads import Workload

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
