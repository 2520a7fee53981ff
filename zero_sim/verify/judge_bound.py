"""The judge where the order of addition is not known: sums within bounds, all else bit for bit.

[Note: what is owed where the order is not known]
Step by step, each of these is checked, and together they leave the sums no other freedom:

1. Every rank is replayed from the working params that the system showed after the step before. So
   its losses are owed bit for bit, and its local gradients are known.
2. A reduced gradient lies within the bound that is proven from these; where no order can change it,
   it is owed bit for bit.
3. Ranks that hold the same sum hold the same bits of it: one rank finishes it and copies travel.
4. Master and optimizer state follow bit for bit from the gradient that the system showed.
5. The norm lies within what the bounds of the gradients leave it, is one number on all ranks, and
   is that of the gradients that they show. What is clipped by it is clipped by what ranks say.
6. A working param is its master, cast, on the rank that owns it; and the same on all ranks. It is
   these that the next step is replayed from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zero_sim.reference import BoundedReference, BoundedStep, Follower, Reference, ReferenceStep
from zero_sim.scenario.spec import Scenario
from zero_sim.targets import OwnedPart, StepResult
from zero_sim.targets.adapt import PARTS
from zero_sim.verify import findings
from zero_sim.verify.copies import Copy, Ledger, What, digest_of
from zero_sim.verify.harness import AskedEngine
from zero_sim.verify.judge import Judge
from zero_sim.verify.owed import Width
from zero_sim.verify.records import Finding
from zero_sim.verify.seen import Seen, with_shown
from zero_sim.verify.shown import Shown
from zero_sim.verify.tally import Tally, Told
from zero_sim.workloads import Workload


def build_reference(
    scenario: Scenario, *, workload: Workload, uncounted: Sequence[str] = ()
) -> Reference:
    """Build the reference that fits what is known of the order; arguments are `Reference`'s."""
    kind = Reference if scenario.world.order_known else BoundedReference
    return kind(scenario, workload=workload, uncounted=uncounted)


def build_judge(scenario: Scenario, *, reference: Reference, **options: Any) -> Judge:
    """Build the judge that fits what is known of the order; arguments are `Judge`'s."""
    if scenario.world.order_known:
        return Judge(scenario, reference=reference, **options)
    assert isinstance(reference, BoundedReference)
    return BoundJudge(scenario, reference=reference, **options)


class BoundJudge(Judge):
    """Judges one run of which nobody knows how sums are added.

    See [Note: what is owed where the order is not known]. Arguments are `Judge`'s; such a judge
    shares a norm with no other.
    """

    def __init__(self, scenario: Scenario, *, reference: BoundedReference, **options: Any) -> None:
        super().__init__(scenario, reference=reference, **options)
        self._bounded = reference
        self._ledger = Ledger(self.world_ranks)
        self._followers: dict[tuple[str, int, int], tuple[int, Follower]] = {}
        """By part of a param: after how many steps, and its master and state."""
        self._norms: dict[int, Tensor | None] = {}
        """By rank: the norm that it said last."""
        self._width = Width()
        self._unfollowed = ""
        self._copies: list[Copy] = []
        self._tallies: list[Tally] = []
        self._sayings: list[Told] = []
        system = scenario.system
        self._replica_count = scenario.world.size if system.stage == 0 else system.redundancy

    def observe(
        self,
        rank: int,
        step: int,
        losses: Sequence[Tensor],
        result: StepResult,
        engine: AskedEngine,
    ) -> None:
        """Judge all of a rank's state after a step; nothing once the run cannot be followed."""
        if self.uncertified_step is not None and step > self.uncertified_step:
            self._skipped.setdefault(step, bool(result.skipped))
            self._close_window(rank, step)
            return
        self._norms[rank] = result.norm
        super().observe(rank, step, losses, result, engine)

    def seen(self) -> Seen:
        """All there is to say of this run; what ranks showed is compared where all of them did."""
        shown = Shown(
            copies=tuple(self._copies), tallies=tuple(self._tallies), told=tuple(self._sayings)
        )
        seen = replace(super().seen(), width=self._width, unfollowed=self._unfollowed, shown=shown)
        return with_shown(seen) if self._sees_all else seen

    @property
    def _sees_all(self) -> bool:
        return len(self._observed) == self.scenario.world.size

    def step_unseen(self) -> None:
        """Do nothing: of a step of which nothing is shown here, nothing can be said."""

    def _advance(self) -> None:
        """Take the params that were shown after the last step and replay the next one."""
        done = max(self._skipped, default=None)
        if done is not None:
            self._bounded.adopt(self._ledger.params_of(done))
            self._ledger.forget(before=min(done, *self._observed.values()))
        self._take(self._bounded.replay_step())

    def _take(self, taken: ReferenceStep) -> None:
        assert isinstance(taken, BoundedStep)
        super()._take(taken)
        self._unfollowed = self._why_not_followed(taken)
        if self._unfollowed:
            self.uncertified_step = taken.step
        elif taken.norm.isfinite():
            self._width += _width_of(taken)

    def _why_not_followed(self, taken: BoundedStep) -> str:
        """Why what comes of a step cannot be judged; empty where it can."""
        if PARTS in self.unobserved:
            return (
                "the order of addition is not known, so that an update can only be followed from "
                f"the gradient that was reduced, and the target does not tell its {PARTS}"
            )
        narrow = any(grad.dtype is not torch.float32 for grad in taken.grads.values())
        if self._tells_divided(taken) and narrow:
            return (
                "the order of addition is not known, so that an update can only be followed from "
                "the gradient that was reduced, and the target tells it after a division that "
                "rounds. Try system.divide = 'pre'"
            )
        if taken.overflow == "possible":
            return (
                "gradients are so large that whether their sum overflows depends on the order of "
                "addition, which is not known. Try smaller ones, or a smaller loss scale"
            )
        return ""

    def _tells_divided(self, taken: BoundedStep) -> bool:
        """Whether the gradients that are told are divided already, by more than 1."""
        return taken.divisor != 1 and self._numerics.grads_told != "before-division"

    def _compare_measured(
        self, rank: int, step: int, result: StepResult, expected: ReferenceStep
    ) -> Iterator[Finding]:
        assert isinstance(expected, BoundedStep)
        if expected.overflow != "never":
            return
        norm, zeros = result.norm, result.zeros
        if norm is not None:
            self.compared_elems += 1
            low, high = expected.norm_min, expected.norm
            if norm.dtype != high.dtype or not bool(low <= norm <= high):
                ends = low.item(), high.item()
                yield findings.said_outside("norm", step, rank, ends=ends, got=norm.item())
            yield from self._compare_copies("norm", norm, step=step, rank=rank)
        if zeros is not None and not expected.zeros_min <= zeros <= expected.zeros:
            ends = expected.zeros_min, expected.zeros
            yield findings.said_outside("zeros", step, rank, ends=ends, got=zeros)
        self._sayings.append(
            Told(
                step=step,
                rank=self.world_ranks[rank],
                norm=None if norm is None else norm.item(),
                zeros=zeros,
                terms=sum(expected.grads[name].numel() for name in expected.active),
            )
        )

    def _compare_part(
        self, rank: int, step: int, part: OwnedPart, expected: ReferenceStep
    ) -> Iterator[Finding]:
        assert isinstance(expected, BoundedStep)
        place = part.place
        name, start, stop = place.param, place.start, place.stop
        at = findings.owned("equality.grad", "", step, rank, place)
        wanted = expected.grads[name].reshape(-1)[start:stop]
        self.compared_elems += wanted.numel()
        if part.grad.dtype != wanted.dtype or part.grad.numel() != wanted.numel():
            yield findings.differing(at, wanted, part.grad)
            return
        bound = expected.bounds[name].cut(start, stop)
        if self._tells_divided(expected):
            bound = bound.divided_by(expected.divisor)
        inside = bound.holds(part.grad)
        if not bool(inside.all()):
            yield findings.outside(at, bound, inside, part.grad)
        if self._replica_count > 1:
            yield from self._compare_copies(
                "grad", part.grad, step=step, rank=rank, param=name, start=start
            )
        follower = self._follow(rank, part, expected)
        yield from self._compare_update(rank, step, part, follower.master, follower.state)

    def _follow(self, rank: int, part: OwnedPart, expected: BoundedStep) -> Follower:
        """Return a part's follower, after the step; the first rank to be seen takes it."""
        place = part.place
        key = place.param, place.start, place.stop
        if key not in self._followers:
            follower = self._bounded.follow(place.param, start=place.start, stop=place.stop)
            self._followers[key] = self.first_step, follower
        steps, follower = self._followers[key]
        if steps <= expected.step:
            if place.param in expected.active and not expected.skipped:
                measured = follower.step(
                    part.grad,
                    update=expected.update,
                    norm=self._norms[rank],
                    divided=self._tells_divided(expected),
                )
                self._tallies.append(
                    Tally(
                        step=expected.step,
                        param=place.param,
                        start=place.start,
                        squares=measured.squares,
                        terms=measured.terms,
                        zeros=measured.zeros,
                    )
                )
            self._followers[key] = expected.step + 1, follower
        return follower

    def _compare_told_gradients(
        self, rank: int, step: int, engine: AskedEngine, expected: ReferenceStep
    ) -> Iterator[Finding]:
        """Compare nothing: what tells no parts is not followed."""
        yield from ()

    def _compare_whole_params(
        self, rank: int, step: int, params: Mapping[str, Tensor], expected: ReferenceStep
    ) -> Iterator[Finding]:
        for name, like in expected.params.items():
            got = params.get(name)
            at = findings.param(step, rank, name)
            if got is None:
                yield replace(at, message="the system does not have this param")
                continue
            self.compared_elems += like.numel()
            if got.dtype != like.dtype or got.numel() != like.numel():
                yield findings.differing(at, like, got)
            else:
                yield from self._compare_copies("params", got, step=step, rank=rank, param=name)

    def _compare_copies(
        self,
        what: What,
        held: Tensor,
        *,
        step: int,
        rank: int,
        param: str = "",
        start: int = 0,
    ) -> Iterator[Finding]:
        """Compare what a rank holds with what others do, those that are judged elsewhere later."""
        yield from self._ledger.compare(what, held, step=step, rank=rank, param=param, start=start)
        if not self._sees_all:
            self._copies.append(
                Copy(
                    step=step,
                    what=what,
                    param=param,
                    start=start,
                    rank=self.world_ranks[rank],
                    digest=digest_of(held),
                )
            )


def _width_of(taken: BoundedStep) -> Width:
    """How much the bounds of a step allow."""
    bounds = [(b, b.low != b.high) for b in taken.bounds.values()]
    return Width(
        reach=max((bound.reach for bound, loose in bounds if bool(loose.any())), default=0.0),
        signless=sum(int((loose & ~bound.signed).sum()) for bound, loose in bounds),
    )
