"""The comparison with steps that were kept of another case's reference, as long as all agrees.

Whose reference took a step never changes what is found: at the first difference the case's own one
takes all steps so far, and everything is compared with that, as where nothing is kept.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence

from torch import Tensor

from zero_sim.findings.records import Finding
from zero_sim.judge.exact import ExactComparison
from zero_sim.judge.judge_report import JudgeReport
from zero_sim.judge.judged_group import JudgedGroup
from zero_sim.judge.trajectory import Trajectory, placed_as
from zero_sim.reference import Addresses, ReferenceStep
from zero_sim.targets import CompletedEngine, OwnedPart, StepResult

_BY_ELEMENTS = ("params",)
"""Models that compute element by element, so that where params lie in memory changes no bits."""


class TrajectoryComparison:
    """Holds a group to a trajectory, and adds the steps to it that nobody has taken yet.

    Where it finds something while `is_alone` is false, `go_alone` is to be called, and all that was
    observed of the step to be compared again.

    Args:
        group: The judged group, and what is known of it.
        exact: The comparison with a reference of its own, which lags behind as long as all agrees.
        trajectory: What was kept, of all groups that share a norm.
    """

    steps_unseen = True

    def __init__(
        self, group: JudgedGroup, *, exact: ExactComparison, trajectory: Trajectory
    ) -> None:
        self._group = group
        self._exact = exact
        self._trajectory = trajectory
        self._addresses: Sequence[Addresses] | None = None
        self._placed: Hashable = None
        self._next_step = group.first_step
        self.is_alone = False
        """Whether it compares with a reference of its own."""

    @property
    def steps(self) -> Mapping[int, ReferenceStep]:
        """Those that any reference has taken and that are not forgotten."""
        return self._exact.steps

    @property
    def uncertified_step(self) -> int | None:
        """As `Comparison` says."""
        return self._exact.uncertified_step

    def follows(self, step: int) -> bool:
        """Always: it needs nothing to be shown."""
        return True

    def set_addresses(self, addresses: Sequence[Addresses]) -> None:
        """Tell where each rank's working params lie, before the first step."""
        self._addresses = addresses
        by_elements = self._group.scenario.model.name in _BY_ELEMENTS
        self._placed = placed_as(None if by_elements else addresses)

    def watch_updates(self) -> None:
        """Let updates be explained by rules for gradients, where these are not told."""
        self._exact.watch_updates()

    def note_told(self, norm: Tensor | None) -> None:
        """Note the norm that a rank tells of the step that is about to be compared."""
        self._exact.note_told(norm)

    def advance(self, peers: Sequence[TrajectoryComparison]) -> Sequence[ReferenceStep]:
        """Find the next step of all groups that share a norm, or take it where none is kept.

        Args:
            peers: All groups that share it, this one among them.
        """
        placed = tuple(each._placed for each in peers)
        kept = None if self.is_alone else self._trajectory.step(self._next_step, placed=placed)
        if kept is None:
            self.go_alone(peers)
            taken = self._exact.advance([each._exact for each in peers])
            self._trajectory.keep(taken, placed=placed)
        else:
            taken = kept
            for each, own in zip(peers, kept, strict=True):
                each._exact.take(own)
        for each in peers:
            each._next_step += 1
        return taken

    def go_alone(
        self, peers: Sequence[TrajectoryComparison], *, agreed: Sequence[OwnedPart] = ()
    ) -> None:
        """Take all steps so far with references of this case's own, and go on with these.

        Args:
            peers: All groups that share a norm, this one among them.
            agreed: Parts that were compared after the last of these steps, and are as they were.
        """
        if self.is_alone:
            return
        self._exact.catch_up(
            [each._exact for each in peers],
            stop=self._next_step,
            addresses=[each._addresses for each in peers],
            shown=[frozenset(each.steps) for each in peers],
        )
        for each in peers:
            each.is_alone = True
        for part in agreed:
            self._exact.note_agreed(part, step=self._next_step - 1)

    def forget(self, step: int) -> None:
        """Forget a step that every rank was shown with."""
        self._exact.forget(step)

    def scales(self, step: int) -> Mapping[str, Tensor]:
        """The scales of params in fp8 after a step."""
        return self._exact.scales(step)

    def compare_loaded(self, engine: CompletedEngine, *, rank: int) -> Iterator[Finding]:
        """Compare all that a rank goes on with after a load, before its first step."""
        return self._exact.compare_loaded(engine, rank=rank)

    def compare_measured(self, result: StepResult, *, rank: int, step: int) -> Iterator[Finding]:
        """Compare norm and zeros; the norm only where every order of adding gives it."""
        return self._exact.compare_measured(result, rank=rank, step=step)

    def compare_part(self, part: OwnedPart, *, rank: int, step: int) -> Iterator[Finding]:
        """Compare a part's gradient, master and optimizer state."""
        return self._exact.compare_part(part, rank=rank, step=step)

    def compare_reported(
        self, engine: CompletedEngine, *, rank: int, step: int
    ) -> Iterator[Finding]:
        """Compare gradients of whole params, where the target declares that it shows them."""
        return self._exact.compare_reported(engine, rank=rank, step=step)

    def compare_params(
        self, params: Mapping[str, Tensor], *, rank: int, step: int
    ) -> Iterator[Finding]:
        """Compare the working params that a rank holds, those that others own included."""
        return self._exact.compare_params(params, rank=rank, step=step)

    def add_to(self, judged: JudgeReport) -> JudgeReport:
        """Return what was seen with the rules that would fit what differs."""
        return self._exact.add_to(judged)
