"""The comparison with the reference, one seam whether the order of addition is known or not.

Where the order is known, the reference tells the bits of all there is (`judge.exact`). Where
it is not, sums owe a place between two numbers, and all that follows from them its bits
(`judge.bounded`). A judge knows no difference between the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, Self

from torch import Tensor

from zero_sim.errors import UsageError
from zero_sim.findings.records import Finding
from zero_sim.judge.bounded import BoundedComparison
from zero_sim.judge.by_digest import DigestComparison
from zero_sim.judge.by_trajectory import TrajectoryComparison
from zero_sim.judge.exact import ExactComparison
from zero_sim.judge.judge_report import JudgeReport
from zero_sim.judge.judged_group import JudgedGroup
from zero_sim.judge.step_digests import StepDigests, StepWire
from zero_sim.judge.trajectory import LateReference, Trajectory
from zero_sim.reference import (
    Addresses,
    BoundedReference,
    BoundedStep,
    Reference,
    ReferenceStep,
    Rules,
)
from zero_sim.scenario.spec import Scenario
from zero_sim.targets import CompletedEngine, OwnedPart, StepResult
from zero_sim.workloads import Workload

AnyReference = Reference | BoundedReference
AnyStep = ReferenceStep | BoundedStep | StepDigests


class Comparison(Protocol):
    """What one group of ranks owes, step by step."""

    @property
    def steps(self) -> Mapping[int, AnyStep]:
        """Those that the reference has taken and that are not forgotten."""
        ...

    @property
    def uncertified_step(self) -> int | None:
        """Step from whose update on nothing is owed; None as long as all is."""
        ...

    @property
    def steps_unseen(self) -> bool:
        """Whether the reference can take a step without being shown the one before."""
        ...

    def follows(self, step: int) -> bool:
        """Whether the reference can take a step at all."""
        ...

    def set_addresses(self, addresses: Sequence[Addresses]) -> None:
        """Tell where each rank's working params lie, before the first step."""
        ...

    def watch_updates(self) -> None:
        """Let updates be explained by rules for gradients, where these are not told."""
        ...

    def note_told(self, norm: Tensor | None) -> None:
        """Note the norm that a rank tells of the step that is about to be compared."""
        ...

    def advance(self, peers: Sequence[Self]) -> Sequence[AnyStep]:
        """Take the next step of all groups that share a norm, this one among them."""
        ...

    def forget(self, step: int) -> None:
        """Forget a step that every rank was shown with."""
        ...

    def scales(self, step: int) -> Mapping[str, Tensor]:
        """The scales of params in fp8 after a step."""
        ...

    def compare_loaded(self, engine: CompletedEngine, *, rank: int) -> Iterator[Finding]:
        """Compare all that a rank goes on with after a load, before its first step."""
        ...

    def compare_measured(self, result: StepResult, *, rank: int, step: int) -> Iterator[Finding]:
        """Compare what was measured of the whole gradient."""
        ...

    def compare_part(self, part: OwnedPart, *, rank: int, step: int) -> Iterator[Finding]:
        """Compare a part that a rank owns: its gradient, its master, its optimizer state."""
        ...

    def compare_reported(
        self, engine: CompletedEngine, *, rank: int, step: int
    ) -> Iterator[Finding]:
        """Compare gradients of whole params, where the target declares that it shows them."""
        ...

    def compare_params(
        self, params: Mapping[str, Tensor], *, rank: int, step: int
    ) -> Iterator[Finding]:
        """Compare the working params that a rank holds, those that others own included."""
        ...

    def add_to(self, judged: JudgeReport) -> JudgeReport:
        """Return what was seen of a run with what only this knows."""
        ...


def comparison_of(
    group: JudgedGroup,
    *,
    reference: AnyReference | LateReference,
    order_seed: int,
    heard_by: StepWire | Trajectory | None = None,
) -> Comparison:
    """What a group owes by a reference.

    Args:
        group: The judged group, and what is known of it.
        reference: The oracle, at the step before the first one.
        order_seed: Seed of the world, from which orders are drawn.
        heard_by: Where another process tells what its reference of the same computes, if one does;
            or the steps that references of the same took in other cases.
    """
    if not isinstance(reference, BoundedReference):
        exact = ExactComparison(group, reference=reference, order_seed=order_seed)
        if heard_by is None:
            return exact
        if isinstance(heard_by, Trajectory):
            return TrajectoryComparison(group, exact=exact, trajectory=heard_by)
        return DigestComparison(group, exact=exact, wire=heard_by)
    return BoundedComparison(group, reference=reference)


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
