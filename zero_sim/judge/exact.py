"""The comparison where the order of addition is known: every bit, as the reference computes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from zero_sim.findings import describe as findings
from zero_sim.findings.compare import same_bits
from zero_sim.findings.recognition import Known
from zero_sim.findings.records import Finding
from zero_sim.judge.factors import FactorCauses
from zero_sim.judge.forward_reads import ForwardReads, compare_losses
from zero_sim.judge.judge_report import JudgeReport
from zero_sim.judge.judged_group import JudgedGroup
from zero_sim.judge.loaded import compare_loaded
from zero_sim.judge.rules import (
    Pick,
    RulesTrial,
    grad_picked,
    param_picked,
    part_picked,
    why_blind,
)
from zero_sim.judge.step_source import StepSource
from zero_sim.judge.told import OtherGrads, reported_sum, told_as, told_otherwise
from zero_sim.reference import (
    PartialSum,
    ReferenceStep,
    norms_of_shard,
    partial_sums,
    quotient,
)
from zero_sim.scenario.checks import Check
from zero_sim.targets import CompletedEngine, OwnedPart, StepResult
from zero_sim.targets.adapt import GRADIENTS


class ExactComparison:
    """Holds a group to the bits that its reference computes.

    Args:
        group: The judged group, and what is known of it.
        source: Steps of its reference.
    """

    def __init__(self, group: JudgedGroup, *, source: StepSource) -> None:
        self._group = group
        self._comparer = group.comparer
        self._source = source
        self._steps: Mapping[int, ReferenceStep] = source.steps
        self._told_at = group.numerics.told_at
        self._rules = RulesTrial(scenario=group.scenario)
        self._grad_rules = RulesTrial("gradient", scenario=group.scenario)
        self._mistakes = RulesTrial("mistake")

    def forget(self, step: int) -> None:
        """Forget a step that every rank was compared with."""
        self._rules.forget(step)
        self._grad_rules.forget(step)
        self._mistakes.forget(step)

    def scale_names(self, step: int) -> Iterable[str]:
        """Return the names of params in fp8."""
        return self._steps[step].scales

    def compare_scales(
        self, scales: Mapping[str, Tensor | None], *, rank: int, step: int
    ) -> Iterator[Finding]:
        """Compare the scales of params in fp8 after a step."""
        expected = self._steps[step].scales
        for name, scale in scales.items():
            at = findings.scale(step, rank, name)
            if scale is None:
                yield findings.missing(at, "the system does not have the scale of this param")
            elif self._comparer.differs(expected[name], scale):
                yield findings.differing(at, expected[name], scale)

    def compare_losses(
        self, losses: Sequence[Tensor], *, reads: ForwardReads | None, rank: int, step: int
    ) -> Iterator[Finding]:
        """Compare a rank's losses, and if one differs the params that its forward read."""
        return compare_losses(losses, self._steps[step], reads=reads, group=self._group, rank=rank)

    def compare_loaded(self, engine: CompletedEngine, *, rank: int) -> Iterator[Finding]:
        """Compare all that a rank goes on with after a load, before its first step."""
        standing = self._source.reference.standing()
        # Ranks that wait for none of the others may be steps ahead of them.
        if standing.next_step == self._group.first_step:
            yield from compare_loaded(self._group, engine, standing=standing, rank=rank)

    def compare_measured(self, result: StepResult, *, rank: int, step: int) -> Iterator[Finding]:
        """Compare norm and zeros; the norm only where every order of adding gives it."""
        expected = self._steps[step]
        norm = result.norm if expected.norm_certified else None
        if self._group.numerics.norm == "told":
            self._group.unobserved.add("norm")
            norm = None
        if norm is not None and self._comparer.differs(expected.norm, norm):
            known = list(self._known_norms(expected, rank=rank))
            found = self._group.differing(
                findings.norm(step, rank),
                expected.norm,
                norm,
                known=lambda: known,
                factors=self._factors_of(expected, is_mean=True, noun="that of the {}"),
            )
            # A norm of one shard may have the bits of a rule, too, where others are empty.
            is_known = any(same_bits(each.values, norm) for each in known)
            rule = "" if is_known else self._norm_rule(expected, norm)
            yield replace(found, detail="\n".join(filter(None, [found.detail, rule])))
        if result.zeros is not None and result.zeros != expected.zeros:
            yield findings.misreported(
                "zeros", step, rank, expected=expected.zeros, got=result.zeros
            )

    def _known_norms(self, expected: ReferenceStep, *, rank: int) -> Iterator[Known]:
        """Norms that may stand in place of that of the whole gradient: those of one shard."""
        if self._group.scenario.world.size == 1:
            return
        # Without alternatives nothing is clipped.
        whole = expected.stepped if expected.otherwise is None else expected.otherwise.grads
        shards = self._group.scenario.world.size // self._group.scenario.system.redundancy
        holding = self._group.ownership.holding_of(rank)
        if holding and sum(each.stop - each.start for each in holding) >= sum(
            grad.numel() for grad in whole.values()
        ):
            return  # It has all of it, so that its norm is that of the whole gradient.
        what = "the norm of this rank's shard alone: the squares were not added over the ranks"
        for norm in norms_of_shard(whole, holding, rank=rank % shards, shard_count=shards):
            if not same_bits(norm, expected.norm):
                yield Known(what=what, values=norm)

    def _norm_rule(self, expected: ReferenceStep, norm: Tensor) -> str:
        """Name the known rules that give a norm, and how to declare the first one."""
        others = {} if expected.otherwise is None else expected.otherwise.norms()
        fitting = [said for said, other in others.items() if same_bits(other, norm)]
        if not fitting:
            return ""
        advice = why_blind(self._group.scenario, shows_factor=True) or (
            f"If this is intended, declare Numerics({fitting[0].replace(' = ', '=')})"
        )
        return f"these are the bits of {' or '.join(fitting)}.\n{advice}"

    def compare_part(self, part: OwnedPart, *, rank: int, step: int) -> Iterator[Finding]:
        """Compare a part's gradient, master and optimizer state."""
        expected, place = self._steps[step], part.place
        name, start, stop = place.param, place.start, place.stop
        whole = stop - start == expected.masters[name].numel()

        def cut(tensor: Tensor) -> Tensor:
            flat = tensor.reshape(-1)
            return flat if whole else flat[start:stop]

        yield from self._compare_grad(part, expected, rank=rank, step=step, cut=cut)
        if expected.one_device is not None and part.grad is not None:
            one = cut(expected.one_device[name])
            yield from self._compare_with_one(one, part, divisor=expected.divisor, at=(step, rank))
        want = expected.state[name]
        found = list(
            self._group.compare_update(
                part,
                rank=rank,
                step=step,
                master=cut(expected.masters[name]),
                state={key: cut(value) if value.dim() else value for key, value in want.items()},
                known=partial(_known_updates, expected, name=name, start=start),
            )
        )
        yield from found
        pick, got = part_picked(part)
        self._look_at_update(expected, pick=pick, got=got, rank=rank, agrees=not found)

    def _look_at_update(
        self,
        expected: ReferenceStep,
        *,
        pick: Pick,
        got: Mapping[str, Tensor],
        rank: int,
        agrees: bool,
    ) -> None:
        """Let other rules and known mistakes explain an update that differs."""
        step = expected.step
        self._rules.look(step, expected.otherwise, pick=pick, got=got, agrees=agrees)
        if self._grad_rules.of_step(step) is None:
            self._mistakes.look(
                step, expected.mistakes, pick=lambda of: pick(of(rank)), got=got, agrees=agrees
            )

    def note_agreed(self, part: OwnedPart, *, step: int) -> None:
        """Note a part that was found to be as it is owed in another way."""
        pick, got = part_picked(part)
        self._rules.look(step, self._steps[step].otherwise, pick=pick, got=got, agrees=True)

    def _compare_grad(
        self,
        part: OwnedPart,
        expected: ReferenceStep,
        *,
        rank: int,
        step: int,
        cut: Callable[[Tensor], Tensor],
    ) -> Iterator[Finding]:
        """Compare a part's reduced gradient, where it is told."""
        name, wanted = part.place.param, self._as_reported(expected, part.place.param)
        if wanted is None:
            return  # Nothing was stepped, so that nobody was given anything.
        grad = cut(wanted)
        at = partial(findings.owned, Check.EQUALITY_GRAD, "", step, rank, part.place)
        if part.grad is None:
            # None stands for zeros, as of a param that is frozen or that no rank used.
            if grad.any() and not self._group.telling[rank]:
                self._group.unobserved.add(GRADIENTS)
            elif grad.any():
                yield findings.missing(at(), "the system has no gradient of this param")
            return
        differs = self._comparer.differs(grad, part.grad)
        self._look_at_grad(expected, name, part.grad, cut=cut, agrees=not differs)
        if differs:
            known = partial(
                self._known_grads, expected, rank=rank, name=name, start=part.place.start
            )
            factors = self._factors(expected)
            found = self._group.differing(at(), grad, part.grad, known=known, factors=factors)
            side = told_otherwise(expected, name, cut, part.grad, numerics=self._group.numerics)
            yield replace(found, detail="\n".join(filter(None, [found.detail, side])))

    def _compare_with_one(
        self, one: Tensor, part: OwnedPart, *, divisor: float, at: tuple[int, int]
    ) -> Iterator[Finding]:
        """Compare a part's mean over the ranks with the gradient of one device."""
        assert part.grad is not None
        got, owed = part.grad, one
        if divisor != 1:
            owed = one.to(torch.float32)
            got = got if self._group.tells_divided else quotient(got.to(torch.float32), divisor)
        if self._comparer.differs(owed, got):
            found = findings.owned(Check.INVARIANT_ONE_DEVICE, "", *at, part.place)
            found = self._group.differing(found, owed, got)
            ranks = self._group.scenario.world.size
            share = f"{found.differ_count} of {found.compared_count} elements differ"
            why = f"what is divided by {ranks}, or added {ranks} times, may be rounded on the way"
            yield replace(found, message=f"{found.message}; {share}: {why}")

    def compare_reported(
        self, engine: CompletedEngine, *, rank: int, step: int
    ) -> Iterator[Finding]:
        """Compare gradients of whole params, where the target declares that it shows them."""
        group = self._group
        group.note_unreported(divisor=self._steps[step].divisor)
        if not group.shows_grads_of_params:
            return
        reported = engine.gradients()
        # In the order of the params: that of a set is another one in every process.
        for name in (
            each for each in self._steps[step].grads if each in group.ownership.held[rank]
        ):
            wanted, got = self._as_reported(self._steps[step], name), reported.get(name)
            if wanted is None:
                continue
            if got is None:
                if wanted.any():
                    at = findings.gradient(step, rank, name)
                    yield findings.missing(at, "the system has no gradient of this param")
                continue
            differs = self._comparer.differs(wanted, got)
            self._look_at_grad(self._steps[step], name, got, cut=_whole, agrees=not differs)
            if differs:
                at = findings.gradient(step, rank, name)
                known = partial(self._known_grads, self._steps[step], rank=rank, name=name, start=0)
                factors = self._factors(self._steps[step])
                found = self._group.differing(at, wanted, got, known=known, factors=factors)
                side = told_otherwise(self._steps[step], name, _whole, got, numerics=group.numerics)
                yield replace(found, detail="\n".join(filter(None, [found.detail, side])))

    def _known_grads(
        self, expected: ReferenceStep, *, rank: int, name: str, start: int
    ) -> Iterator[Known]:
        """What may stand in place of a reduced gradient: a rank's own, or another param's."""
        yield from self._partial_grads(expected, rank=rank, name=name, start=start)
        told = {each: self._as_reported(expected, each) for each in expected.grads}
        yield from _of_params({n: v for n, v in told.items() if v is not None}, start=start)

    def _partial_grads(
        self, expected: ReferenceStep, *, rank: int, name: str, start: int
    ) -> Iterator[Known]:
        """Gradients that lack terms; of those with the same bits, the likeliest alone."""
        sums = expected.other_sums
        if sums is None or name not in sums.local.active:
            return
        partials = [(rank, each, each.name) for each in partial_sums(sums)]
        for other, world_rank in enumerate(self._group.world_ranks):
            if other != rank:
                local = PartialSum(name=f"rank {world_rank} alone, not reduced", is_local=True)
                partials.append((other, local, local.name))
        seen: list[Tensor] = []
        for observer, partial_sum, what in partials:
            other = partial_sum.of_param(sums, name, rank=observer)
            if other is None:
                continue
            values = reported_sum(other, expected, name, numerics=self._group.numerics)
            if not any(same_bits(values, each) for each in seen):
                seen.append(values)
                yield Known(what=f"the gradient of {what}", values=values, start=start)

    def _factors(self, expected: ReferenceStep) -> FactorCauses:
        """Causes of a factor of reduced gradients as the target reports them."""
        division = expected.division
        is_sum = division.rest != 1 and not self._group.tells_divided and not division.each_round
        return self._factors_of(expected, is_mean=not is_sum)

    def _factors_of(
        self, expected: ReferenceStep, *, is_mean: bool, noun: str = "the {}"
    ) -> FactorCauses:
        return FactorCauses.of(
            expected.losses,
            divisor=1 if expected.division.how == "none" else expected.division.count,
            replicas=self._group.scenario.system.redundancy,
            is_mean=is_mean,
            noun=noun,
        )

    def _as_reported(self, expected: ReferenceStep, name: str) -> Tensor | None:
        """A reduced gradient as the target is to tell it; None where it is given none."""
        dtype = self._group.numerics.told_dtype
        return told_as(expected, name, point=self._told_at, dtype=dtype)

    def _look_at_grad(
        self,
        expected: ReferenceStep,
        name: str,
        got: Tensor,
        *,
        cut: Callable[[Tensor], Tensor],
        agrees: bool,
    ) -> None:
        """Let other rules explain a gradient that differs, at the point where it is told."""
        if self._told_at != "after-clip":
            pick, shown = grad_picked(name, got, cut=cut)
            sums = OtherGrads.of(expected, self._group.numerics)
            self._grad_rules.look(expected.step, sums, pick=pick, got=shown, agrees=agrees)

    def compare_params(
        self, params: Mapping[str, Tensor], *, rank: int, step: int
    ) -> Iterator[Finding]:
        """Compare the working params that a rank holds, those that others own included."""
        for name, value in self._steps[step].params.items():
            if name not in self._group.ownership.held[rank]:
                continue
            if name not in params:
                at = findings.param(step, rank, name)
                yield findings.missing(at, "the system does not have this param")
                continue
            differs = self._comparer.differs(value, params[name])
            if differs:
                at = findings.param(step, rank, name)
                known = partial(_known_params, self._steps[step], name=name)
                yield self._group.differing(at, value, params[name], known=known)
            pick, got = param_picked(name, params[name])
            self._look_at_update(
                self._steps[step], pick=pick, got=got, rank=rank, agrees=not differs
            )

    def add_to(self, judged: JudgeReport) -> JudgeReport:
        """Return what was seen with the rules that would fit what differs."""
        bad = judged.bad_step
        rules, mistakes = self._rules.of_step(bad), self._mistakes.of_step(bad)
        if mistakes is not None and mistakes.fitting:
            rules = replace(mistakes, also=rules)
        return replace(judged, rules=self._grad_rules.of_step(bad) or rules)


def _whole(tensor: Tensor) -> Tensor:
    return tensor


def _of_params(values: Mapping[str, Tensor], *, start: int) -> Iterator[Known]:
    """What any param should have, to be looked for at its own place and at any other."""
    for name, value in values.items():
        what = f"what param {name!r} should have"
        yield Known(what=what, values=value, start=start, name=name)


def _known_params(expected: ReferenceStep, *, name: str) -> Iterator[Known]:
    """What may stand in place of a working param: what was there, or another param."""
    if name in expected.params_before:
        yield Known(what="what it was before the step", values=expected.params_before[name])
    yield from _of_params(expected.params, start=0)


def _known_updates(expected: ReferenceStep, key: str, *, name: str, start: int) -> Iterator[Known]:
    """What may stand in place of a master, or of the optimizer state of a key."""
    if key:
        for other, value in expected.state[name].items():
            if value.dim() and other != key:
                what = f"what optimizer state {other!r} should have"
                yield Known(what=what, values=value, start=start)
        of_key = {each: state[key] for each, state in expected.state.items() if key in state}
        yield from _of_params({n: v for n, v in of_key.items() if v.dim()}, start=start)
        return
    if name in expected.masters_before:
        before = expected.masters_before[name]
        yield Known(what="what it was before the step", values=before, start=start)
    yield from _of_params(expected.masters, start=start)
