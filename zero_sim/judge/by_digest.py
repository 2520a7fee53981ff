"""The comparison with a reference that another process has, by digests, as long as all agrees.

Which process computes a step never changes what is found: at the first thing that does not agree,
or that digests do not say, a reference of this process's own takes all steps so far, and everything
is compared with that, as where nobody tells anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from zero_sim.findings.records import Finding
from zero_sim.judge.exact import ExactComparison
from zero_sim.judge.judge_report import JudgeReport
from zero_sim.judge.judged_group import JudgedGroup
from zero_sim.judge.step_digests import StepDigests, StepWire, digest_of
from zero_sim.reference import Addresses, ReferenceStep
from zero_sim.targets import CompletedEngine, OwnedPart, StepResult
from zero_sim.targets.adapt import GRADIENTS


class DigestsDiffer(Exception):
    """Digests do not show that all is as owed; what differs, if anything, they cannot tell."""


class DigestComparison:
    """Holds a group to the digests that another process tells of its reference.

    What it compares agrees or raises `DigestsDiffer`; then `go_alone` is to be called, and all that
    was observed of the step to be compared again.

    Args:
        group: The judged group, and what is known of it.
        exact: The comparison with a reference of its own, which lags behind as long as all agrees.
        wire: Where steps are heard.
    """

    steps_unseen = True

    def __init__(self, group: JudgedGroup, *, exact: ExactComparison, wire: StepWire) -> None:
        self._group = group
        self._exact = exact
        self._wire = wire
        self._heard: dict[int, StepDigests] = {}
        self._addresses: Sequence[Addresses] | None = None
        self._next_step = group.first_step
        self.is_alone = False
        """Whether it compares with a reference of its own."""

    @property
    def steps(self) -> Mapping[int, ReferenceStep | StepDigests]:
        """Those that the reference has taken, wherever it is, and that are not forgotten."""
        return self._exact.steps if self.is_alone else self._heard

    @property
    def uncertified_step(self) -> int | None:
        """As `Comparison` says; what is not certified is not told by digests."""
        return self._exact.uncertified_step

    def follows(self, step: int) -> bool:
        """Always: it needs nothing to be shown."""
        return True

    def set_addresses(self, addresses: Sequence[Addresses]) -> None:
        """Tell where each rank's working params lie, before the first step."""
        self._addresses = addresses

    def watch_updates(self) -> None:
        """Let updates be explained by rules for gradients, where these are not told."""
        self._exact.watch_updates()

    def note_told(self, norm: Tensor | None) -> None:
        """Note the norm that a rank tells of the step that is about to be compared."""
        self._exact.note_told(norm)

    def advance(
        self, peers: Sequence[DigestComparison]
    ) -> Sequence[ReferenceStep] | Sequence[StepDigests]:
        """Hear the next step of all groups that share a norm, or take it where it is not told.

        Args:
            peers: All groups that share it, this one among them.
        """
        heard = None if self.is_alone else self._wire.hear(self._next_step)
        if heard is None:
            self.go_alone(peers)
            return self._exact.advance([each._exact for each in peers])
        told = [StepDigests.from_dict(each) for each in heard]
        for each, own in zip(peers, told, strict=True):
            each._heard[own.step] = own
            each._next_step += 1
        return told

    def go_alone(
        self, peers: Sequence[DigestComparison], *, agreed: Sequence[OwnedPart] = ()
    ) -> None:
        """Take all steps so far with references of this process's own, and go on with these.

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
            # Ranks are shown with the last one at most, but for what is to be seen of it.
            shown=[each._heard for each in peers],
        )
        for each in peers:
            each.is_alone = True
            each._heard.clear()
        for part in agreed:
            self._exact.note_agreed(part, step=self._next_step - 1)

    def forget(self, step: int) -> None:
        """Forget a step that every rank was shown with."""
        self._heard.pop(step, None)
        self._exact.forget(step)

    def scales(self, step: int) -> Mapping[str, Tensor]:
        """The scales of params in fp8 after a step."""
        return self.steps[step].scales

    def compare_loaded(self, engine: CompletedEngine, *, rank: int) -> Iterator[Finding]:
        """Compare all that a rank goes on with after a load, before its first step."""
        yield from self._exact.compare_loaded(engine, rank=rank)

    def compare_measured(self, result: StepResult, *, rank: int, step: int) -> Iterator[Finding]:
        """Compare norm and zeros; the norm only where every order of adding gives it.

        Raises:
            DigestsDiffer: They are not as owed.
        """
        if self.is_alone:
            yield from self._exact.compare_measured(result, rank=rank, step=step)
            return
        expected = self._heard[step]
        norm = result.norm if expected.norm_certified else None
        if norm is not None and self._group.comparer.differs(expected.norm, norm):
            raise DigestsDiffer
        if result.zeros is not None and result.zeros != expected.zeros:
            raise DigestsDiffer

    def compare_part(self, part: OwnedPart, *, rank: int, step: int) -> Iterator[Finding]:
        """Compare a part's gradient, master and optimizer state.

        Raises:
            DigestsDiffer: They are not as owed.
        """
        if self.is_alone:
            yield from self._exact.compare_part(part, rank=rank, step=step)
            return
        expected, place = self._heard[step], part.place
        span = place.param, place.start, place.stop
        if span not in expected.masters:
            raise DigestsDiffer
        grad = expected.grads[span]
        if grad is not None and part.grad is not None:
            self._agree(grad.digest, part.grad)
        elif grad is not None and not grad.is_zero:
            if self._group.telling[rank]:
                raise DigestsDiffer
            self._group.unobserved.add(GRADIENTS)
        self._agree(expected.masters[span], part.master)
        if expected.state[span].keys() != part.state.keys():
            raise DigestsDiffer
        for key, digest in expected.state[span].items():
            self._agree(digest, part.state[key])

    def compare_reported(
        self, engine: CompletedEngine, *, rank: int, step: int
    ) -> Iterator[Finding]:
        """Compare gradients of whole params, where the target declares that it shows them.

        Raises:
            DigestsDiffer: They are not as owed.
        """
        if self.is_alone:
            yield from self._exact.compare_reported(engine, rank=rank, step=step)
            return
        self._group.note_unreported(divisor=self._heard[step].divisor)
        if not self._group.shows_grads_of_params:
            return
        reported = engine.gradients()
        for name, grad in self._heard[step].grads_of_params.items():
            if grad is None or name not in self._group.ownership.held[rank]:
                continue
            if name in reported:
                self._agree(grad.digest, reported[name])
            elif not grad.is_zero:
                raise DigestsDiffer

    def compare_params(
        self, params: Mapping[str, Tensor], *, rank: int, step: int
    ) -> Iterator[Finding]:
        """Compare the working params that a rank holds, those that others own included.

        Raises:
            DigestsDiffer: They are not as owed.
        """
        if self.is_alone:
            yield from self._exact.compare_params(params, rank=rank, step=step)
            return
        for name, digest in self._heard[step].params.items():
            if name not in self._group.ownership.held[rank]:
                continue
            if name not in params:
                raise DigestsDiffer
            self._agree(digest, params[name])

    def add_to(self, judged: JudgeReport) -> JudgeReport:
        """Return what was seen with the rules that would fit what differs."""
        return self._exact.add_to(judged)

    def _agree(self, digest: str, got: Tensor) -> None:
        if digest_of(got) != digest:
            raise DigestsDiffer
        self._group.comparer.elems += got.numel()
