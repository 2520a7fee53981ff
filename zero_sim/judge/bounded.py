"""Comparison for an unknown order of addition: bounds for sums, exact bits for the rest.

[Note: unknown order]
After each step, these checks leave freedom only in the sums:

1. Losses match bit for bit. The reference replays each rank from the working params that the system
   reported after the previous step, so it knows losses and local gradients exactly.
2. A reduced gradient lies within the bound proven from the local gradients. If no order changes the
   sum, it matches bit for bit.
3. All ranks with the same sum have the same bits, because one rank completes it and sends copies.
4. Master and optimizer state follow bit for bit from the reported gradient.
5. The norm lies in the interval that the gradient bounds imply. It is equal on all ranks, and is
   the norm of the reported gradients. Clipping uses the reported norm.
6. The owner's working param is its cast master. It is equal on all ranks, and the next step is
   replayed from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from zero_sim.findings import describe as findings
from zero_sim.findings.records import Finding
from zero_sim.judge.copies import Copy, Ledger, What, digest_of
from zero_sim.judge.factors import FactorCauses
from zero_sim.judge.forward_reads import ForwardReads, compare_losses
from zero_sim.judge.grad_stats import PartStats, ReportedStats
from zero_sim.judge.guarantee import Width
from zero_sim.judge.judge_report import JudgeReport, RankDigests, with_digests
from zero_sim.judge.judged_group import JudgedGroup
from zero_sim.judge.reported_grads import hint_within_bounds
from zero_sim.judge.step_source import Steps
from zero_sim.reference import Addresses, BoundedReference, BoundedStep, Follower
from zero_sim.scenario.checks import Check
from zero_sim.targets import EngineAdapter, OwnedPart, StepResult
from zero_sim.targets.adapt import GRADIENTS, PARTS

_NOT_REPORTED = (
    "the order of addition is unknown, so an update can only be followed from the reduced "
    "gradient, and the target does not report its {what}"
)


class BoundedComparison(Steps):
    """Accepts every result that some order of addition gives; see [Note: unknown order].

    Args:
        group: The judged group.
        reference: Its oracle, before the first step.
    """

    # A replay needs the params that ranks report after the previous step.
    steps_unseen = False

    def __init__(self, group: JudgedGroup, *, reference: BoundedReference) -> None:
        super().__init__()
        self._group = group
        self._comparer = group.comparer
        self._reference = reference
        self._last_step: int | None = None
        self._ledger = Ledger(group.world_ranks)
        self._followers: dict[tuple[str, int, int], tuple[int, Follower]] = {}
        """Number of taken steps, and state after them, by param, start and stop of the part."""
        self._norms: dict[int, Tensor | None] = {}
        """Last reported norm, by rank."""
        self._width = Width()
        self._unfollowed = ""
        self._copies: list[Copy] = []
        self._part_stats: list[PartStats] = []
        self._reported_stats: list[ReportedStats] = []
        world, system = group.scenario.world, group.scenario.system
        # At stage 0 every rank has all state, so each rank is a replica.
        self._replica_count = world.size if system.stage == 0 else system.redundancy

    def follows(self, step: int) -> bool:
        """Return True if all earlier steps were followed."""
        return self.uncertified_step is None or step <= self.uncertified_step

    def start_from(self, params: Mapping[str, Tensor]) -> None:
        """Start from values that the system drew."""
        self._reference.start_from(params)

    def set_addresses(self, addresses: Sequence[Addresses]) -> None:
        """Set the addresses of each rank's working params, before the first step."""
        self._reference.set_addresses(addresses)

    def advance(self, *, reported_norm: Tensor | None = None) -> None:
        """Replay the next step from the params that ranks reported after the last step.

        Args:
            reported_norm: Ignored, because the comparison reads the reported norms.
        """
        taken = self._step()
        if self.on_step is not None:
            self.on_step(taken)

    def _step(self) -> BoundedStep:
        if self._last_step is not None:
            # Not the reference's own params, because sums may differ within their bounds.
            self._reference.adopt(self._ledger.params_of(self._last_step))
        taken = self._reference.replay_step()
        self._last_step = taken.step
        self.steps[taken.step] = taken
        self._unfollowed = self._why_not_followed(taken)
        if self._unfollowed:
            self.uncertified_step = taken.step
        elif taken.norm.isfinite():
            # Only finite norms have finite bounds.
            self._width += _width_of(taken)
        return taken

    def forget(self, step: int) -> None:
        """Drop a step after all ranks were compared, except for its resulting params."""
        super().forget(step)
        self._ledger.forget(before=step)

    def scale_names(self, step: int) -> Sequence[str]:
        """Return nothing, because fp8 params need a known order."""
        return ()

    def compare_scales(
        self, scales: Mapping[str, Tensor | None], *, rank: int, step: int
    ) -> Iterator[Finding]:
        """Yield nothing, because fp8 params need a known order."""
        yield from ()

    def compare_losses(
        self, losses: Sequence[Tensor], *, reads: ForwardReads | None, rank: int, step: int
    ) -> Iterator[Finding]:
        """Compare a rank's losses. If a loss differs, also compare the params its forward read."""
        return compare_losses(losses, self.steps[step], reads=reads, group=self._group, rank=rank)

    def compare_loaded(self, engine: EngineAdapter, *, rank: int) -> Iterator[Finding]:
        """Yield nothing, because a case with an unknown order cannot reload."""
        yield from ()

    def note_agreed(self, part: OwnedPart, *, rank: int, step: int) -> None:
        """Do nothing, because steps are never shared."""

    def add_to(self, judged: JudgeReport) -> JudgeReport:
        """Add width and digests to a report. Compare the digests if all ranks are observed here."""
        digests = RankDigests(
            copies=tuple(self._copies),
            part_stats=tuple(self._part_stats),
            reported=tuple(self._reported_stats),
        )
        judged = replace(judged, width=self._width, unfollowed=self._unfollowed, digests=digests)
        # If other processes have more digests, merging their reports compares them.
        return with_digests(judged) if self._group.sees_all else judged

    def _why_not_followed(self, taken: BoundedStep) -> str:
        """Return the reason why the step's update cannot be followed; empty if it can."""
        if PARTS in self._group.unobserved:
            return _NOT_REPORTED.format(what=PARTS)
        narrow = any(grad.dtype is not torch.float32 for grad in taken.grads.values())
        # Several bf16 sums may round to the same quotient, so a quotient does not determine its
        # sum.
        if self._reports_divided(taken) and narrow:
            return (
                "the order of addition is unknown, so an update can only be followed from the "
                "reduced gradient, and the target reports it after a division that rounds. Set "
                "system.divide = 'pre'"
            )
        if taken.overflow == "possible":
            return (
                "whether the sum of gradients overflows depends on the order of addition, which is "
                "unknown. Use smaller gradients or a smaller loss scale"
            )
        return ""

    def _reports_divided(self, taken: BoundedStep) -> bool:
        return taken.divisor != 1 and self._group.reports_divided

    def compare_measured(self, result: StepResult, *, rank: int, step: int) -> Iterator[Finding]:
        """Compare norm and zeros with the intervals that the bounds imply."""
        expected = self.steps[step]
        self._norms[rank] = result.norm
        if expected.overflow != "never":
            # On overflow the step is skipped, so nothing is measured.
            return
        norm, zeros = result.norm, result.zeros
        if norm is not None:
            self._comparer.elems += 1
            low, high = expected.norm_min, expected.norm
            # Rounding is monotonic, so an fp64 norm lies between the rounded ends.
            if not bool(low <= norm.to(high.dtype) <= high):
                ends = low.item(), high.item()
                yield findings.misreported_range("norm", step, rank, ends=ends, got=norm.item())
            # A norm is one number, so it must be equal on all ranks.
            yield from self._compare_copies("norm", norm, step=step, rank=rank)
        if zeros is not None and not expected.zeros_min <= zeros <= expected.zeros:
            ends = expected.zeros_min, expected.zeros
            yield findings.misreported_range("zeros", step, rank, ends=ends, got=zeros)
        # To compare with the norm of all parts, once every part was observed.
        self._reported_stats.append(
            ReportedStats(
                step=step,
                rank=self._group.world_ranks[rank],
                norm=None if norm is None else norm.item(),
                zeros=zeros,
                # Inactive params do not count in the norm, and their parts are not summed.
                terms=sum(expected.grads[name].numel() for name in expected.active),
            )
        )

    def compare_part(self, part: OwnedPart, *, rank: int, step: int) -> Iterator[Finding]:
        """Compare a part's gradient with its bounds, and its update bit for bit."""
        expected, place = self.steps[step], part.place
        name, start, stop = place.param, place.start, place.stop
        at = findings.owned(Check.EQUALITY_GRAD, "", step, rank, place)
        wanted = expected.grads[name].reshape(-1)[start:stop]
        bound, grad = expected.bounds[name].cut(start, stop), part.grad
        if grad is None and bool(((bound.low == 0) & (bound.high == 0)).all()):
            # Engines report None for zeros, such as the gradient of a frozen or unused param.
            grad, part = wanted, replace(part, grad=wanted)
        if grad is None:
            if self._group.reporting[rank] and bool(bound.signed.any()):
                # The bound excludes zero, so a missing gradient cannot mean zeros.
                yield findings.missing(at, "the system has no gradient of this param")
                return
            self._group.unobserved.add(GRADIENTS)
            self._unfollowed = _NOT_REPORTED.format(what=GRADIENTS)
            self.uncertified_step = step
            return
        self._comparer.elems += wanted.numel()
        if grad.dtype != wanted.dtype or grad.numel() != wanted.numel():
            yield findings.differing(at, wanted, grad)
            return
        of_sum = bound
        divisor = expected.divisor if self._reports_divided(expected) else 1
        if divisor != 1:
            # Gradients are reported after the division, so divide the bound, too.
            bound = of_sum.divided_by(divisor)
        inside = bound.holds(grad)
        if not bool(inside.all()):
            cause = self._factors(expected).explain_within(of_sum, grad, divisor=divisor)
            found = findings.outside(at, bound, inside, grad, cause=cause)
            # Perhaps it fits the bounds on the other side of the division.
            hint = hint_within_bounds(
                of_sum, grad, divisor=expected.divisor, divided=self._group.reports_divided
            )
            yield replace(found, detail=hint)
        if self._replica_count > 1 or place.replicas > 1:
            yield from self._compare_copies(
                "grad", grad, step=step, rank=rank, param=name, start=start
            )
        # From here on exact, because update rules are deterministic.
        follower = self._follow(rank, part, expected)
        if self._reference.cut_dependence:
            # The rule's bits depend on where tensors are cut, so nothing after this is known.
            self._unfollowed = self._reference.cut_dependence
            self.uncertified_step = step
            return
        yield from self._group.compare_update(
            part, rank=rank, step=step, master=follower.master, state=follower.state
        )

    def _factors(self, expected: BoundedStep) -> FactorCauses:
        division = expected.update.division
        return FactorCauses.of(
            expected.losses,
            divisor=1 if division.how == "none" else division.count,
            replicas=self._group.scenario.system.redundancy,
            is_mean=division.rest == 1 or self._group.reports_divided,
        )

    def _follow(self, rank: int, part: OwnedPart, expected: BoundedStep) -> Follower:
        """Return a part's follower after the step. The first replica's call advances it."""
        place = part.place
        key = place.param, place.start, place.stop
        if key not in self._followers:
            follower = self._reference.follow(place.param, start=place.start, stop=place.stop)
            self._followers[key] = self._group.first_step, follower
        steps, follower = self._followers[key]
        if steps <= expected.step:
            if place.param in expected.active and not expected.skipped:
                assert part.grad is not None, "gradients are reported after a step"
                # Use the reported gradient and norm, because they are checked separately.
                measured = follower.step(
                    part.grad,
                    update=expected.update,
                    norm=self._norms[rank],
                    divided=self._reports_divided(expected),
                )
                self._part_stats.append(
                    PartStats(
                        step=expected.step,
                        param=place.param,
                        start=place.start,
                        squares=measured.squares,
                        terms=measured.terms,
                        zeros=measured.zeros,
                    )
                )
                if follower.cut_step is not None:
                    # Imported here, because few cases need it.
                    from zero_sim.judge.adopting import adopt_bits

                    adopt_bits(follower, part)
            self._followers[key] = expected.step + 1, follower
        return follower

    def compare_reported(self, engine: EngineAdapter, *, rank: int, step: int) -> Iterator[Finding]:
        """Yield nothing, because a target without parts cannot be followed."""
        yield from ()

    def compare_params(
        self, params: Mapping[str, Tensor], *, rank: int, step: int
    ) -> Iterator[Finding]:
        """Compare the working params of all ranks with each other."""
        # Sums have no expected bits, so neither do params.
        for name, like in self.steps[step].params_before.items():
            got = params.get(name)
            at = findings.param(step, rank, name)
            if got is None:
                yield findings.missing(at, "the system does not have this param")
                continue
            self._comparer.elems += like.numel()
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
        """Compare a tensor with other ranks' copies; keep its digest for ranks judged elsewhere."""
        yield from self._ledger.compare(what, held, step=step, rank=rank, param=param, start=start)
        if not self._group.sees_all:
            self._copies.append(
                Copy(
                    step=step,
                    what=what,
                    param=param,
                    start=start,
                    rank=self._group.world_ranks[rank],
                    digest=digest_of(held),
                )
            )


def _width_of(taken: BoundedStep) -> Width:
    # Exclude intervals of a single value.
    bounds = [(b, b.low != b.high) for b in taken.bounds.values()]
    return Width(
        reach=max((bound.reach for bound, loose in bounds if bool(loose.any())), default=0.0),
        signless=sum(int((loose & ~bound.signed).sum()) for bound, loose in bounds),
    )
