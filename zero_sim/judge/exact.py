"""Comparison for a known order of addition: bit for bit with the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zero_sim.findings import describe as findings
from zero_sim.findings.compare import same_bits
from zero_sim.findings.recognition import Known
from zero_sim.findings.records import Finding
from zero_sim.judge.explaining import Explanations, grad_seen, param_seen, part_seen
from zero_sim.judge.factors import FactorCauses
from zero_sim.judge.forward_reads import ForwardReads, compare_losses
from zero_sim.judge.judge_report import JudgeReport
from zero_sim.judge.judged_group import JudgedGroup, cut_state
from zero_sim.judge.loaded import compare_loaded
from zero_sim.judge.reported_grads import as_reported, hint_of_other_point
from zero_sim.judge.step_source import StepSource
from zero_sim.reference import ReferenceStep, norms_of_shard, quotient, wide_ends
from zero_sim.scenario.checks import Check
from zero_sim.targets import EngineAdapter, OwnedPart, StepResult
from zero_sim.targets.adapt import GRADIENTS, PARTS

if TYPE_CHECKING:
    from zero_sim.judge.adopting import Adoption


class ExactComparison:
    """Compares a group with the bits that its reference computes.

    Args:
        group: The judged group.
        source: Its reference's steps.
    """

    def __init__(self, group: JudgedGroup, *, source: StepSource) -> None:
        self._group = group
        self._comparer = group.comparer
        self._source = source
        self._steps: Mapping[int, ReferenceStep] = source.steps
        self._reported_at = group.numerics.reported_at
        self._explanations = Explanations(group, reference=lambda: source.reference)
        self._adoption: Adoption | None = None
        if group.scenario.optimizer.name == "own":
            # Imported here, because few cases need it.
            from zero_sim.judge.adopting import Adoption

            self._adoption = Adoption(source)

    def forget(self, step: int) -> None:
        """Drop a step after all ranks were compared."""
        self._explanations.forget(step)

    def scale_names(self, step: int) -> Iterable[str]:
        """Return the names of fp8 params."""
        return self._steps[step].scales

    def compare_scales(
        self, scales: Mapping[str, Tensor | None], *, rank: int, step: int
    ) -> Iterator[Finding]:
        """Compare the scales of fp8 params."""
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
        """Compare a rank's losses. If a loss differs, also compare the params its forward read."""
        return compare_losses(losses, self._steps[step], reads=reads, group=self._group, rank=rank)

    def compare_loaded(self, engine: EngineAdapter, *, rank: int) -> Iterator[Finding]:
        """Compare a rank's loaded state, before its first step."""
        training_state = self._source.reference.training_state()
        # Ranks need not wait for each other. If another rank has stepped, so has the reference,
        # and its loaded state is gone.
        if training_state.next_step == self._group.first_step:
            yield from compare_loaded(self._group, engine, training_state=training_state, rank=rank)

    def compare_measured(self, result: StepResult, *, rank: int, step: int) -> Iterator[Finding]:
        """Compare zeros, and the norm if every order of addition gives the same norm."""
        expected = self._steps[step]
        norm = result.norm if expected.measured.norm_certified else None
        if self._group.numerics.norm == "reported":
            # The reference clips by the reported norm, so it cannot judge it.
            self._group.unobserved.add("norm")
            norm = None
        if norm is not None and norm.dtype == torch.float64:
            # First all digits in fp64, then rounded to fp32 like other norms.
            yield from self._compare_wide(expected, norm, rank=rank)
            norm = norm.to(torch.float32)
        if norm is not None and self._comparer.differs(expected.measured.norm, norm):
            known = list(self._known_norms(expected, rank=rank))
            found = self._group.differing(
                findings.norm(step, rank),
                expected.norm,
                norm,
                known=lambda: known,
                factors=self._factors_of(expected, is_mean=True, noun="that of the {}"),
            )
            # A recognised value explains more than a rule. Both may fit if other shards are empty.
            is_known = any(same_bits(each.values, norm) for each in known)
            explainer = None if is_known else self._explanations.of(expected)
            rule = "" if explainer is None else explainer.explain_norm(norm)
            yield replace(found, detail="\n".join(filter(None, [found.detail, rule])))
        zeros = expected.measured.zeros
        if result.zeros is not None and result.zeros != zeros:
            yield findings.misreported("zeros", step, rank, expected=zeros, got=result.zeros)

    def _compare_wide(
        self, expected: ReferenceStep, norm: Tensor, *, rank: int
    ) -> Iterator[Finding]:
        """Compare an fp64 norm that rounds to the expected fp32 norm."""
        rounded = norm.to(torch.float32)
        if not expected.measured.finite or not same_bits(expected.norm, rounded):
            return  # The comparison in fp32 reports it.
        low, high = wide_ends(self._group.numerics.norm, expected.measured)
        # An engine may also convert an fp32 norm to a Python number.
        if not low <= norm.item() <= high and norm.item() != rounded.item():
            wanted = norm.new_tensor((low + high) / 2)
            yield findings.differing(findings.norm(expected.step, rank), wanted, norm)

    def _known_norms(self, expected: ReferenceStep, *, rank: int) -> Iterator[Known]:
        """Yield candidates for a wrong norm: the norms of this rank's shard."""
        # A single rank's shard is the whole gradient.
        if self._group.scenario.world.size == 1:
            return
        # Recompute from `grads`, because `stepped` is clipped.
        whole = {name: expected.update.apply(expected.grads[name]) for name in expected.stepped}
        shards = self._group.scenario.world.size // self._group.scenario.system.redundancy
        # If places are not reported, `norms_of_shard` tries common shard layouts.
        holding = self._group.ownership.holding_of(rank)
        if holding and sum(each.stop - each.start for each in holding) >= sum(
            grad.numel() for grad in whole.values()
        ):
            return  # This rank has the whole gradient, so its norm is right.
        what = "the norm of this rank's shard alone: the squares were not added over the ranks"
        # Shard groups are consecutive ranks, so `rank % shards` is the rank in the shard group.
        for norm in norms_of_shard(whole, holding, rank=rank % shards, shard_count=shards):
            if not same_bits(norm, expected.norm):
                yield Known(what=what, values=norm)

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
            # `expect.one_device`: all ranks have the same data, so the mean is one rank's gradient.
            one = cut(expected.one_device[name])
            yield from self._compare_with_one(one, part, divisor=expected.divisor, at=(step, rank))
        if self._adoption is not None and not self._adoption.see_part(part, expected):
            # Adopt before comparing. If this fails, nothing after this update is known.
            return
        whole_master = expected.masters[name]
        found = list(
            self._group.compare_update(
                part,
                rank=rank,
                step=step,
                master=cut(whole_master),
                state={
                    key: cut_state(value, master=whole_master, start=start, stop=stop)
                    for key, value in expected.state[name].items()
                },
                known=partial(_known_updates, expected, name=name, start=start),
            )
        )
        yield from found
        self._note_part(expected, part, rank=rank, agrees=not found)

    def _note_part(
        self, expected: ReferenceStep, part: OwnedPart, *, rank: int, agrees: bool
    ) -> None:
        if not expected.skipped:
            self._explanations.note(expected, *part_seen(part, rank=rank), agrees=agrees)

    def note_agreed(self, part: OwnedPart, *, rank: int, step: int) -> None:
        """Record a part that agreed with a shared step, so was not compared here."""
        expected, place = self._steps[step], part.place
        self._note_part(expected, part, rank=rank, agrees=True)
        if part.grad is not None:

            def cut(tensor: Tensor) -> Tensor:
                return tensor.reshape(-1)[place.start : place.stop]

            self._note_grad(expected, place.param, part.grad, rank=rank, cut=cut, agrees=True)

    def _compare_grad(
        self,
        part: OwnedPart,
        expected: ReferenceStep,
        *,
        rank: int,
        step: int,
        cut: Callable[[Tensor], Tensor],
    ) -> Iterator[Finding]:
        """Compare a part's reduced gradient, if it is reported."""
        name, wanted = part.place.param, self._as_reported(expected, part.place.param)
        if wanted is None:
            return  # The step was skipped before this point.
        grad = cut(wanted)
        at = partial(findings.owned, Check.EQUALITY_GRAD, "", step, rank, part.place)
        if part.grad is None:
            # Engines report None for zeros, such as the gradient of a frozen or unused param.
            if grad.any() and not self._group.reporting[rank]:
                # This rank reports no gradients, so they are unobserved, not wrong.
                self._group.unobserved.add(GRADIENTS)
            elif grad.any():
                yield findings.missing(at(), "the system has no gradient of this param")
            return
        differs = self._comparer.differs(grad, part.grad)
        self._note_grad(expected, name, part.grad, rank=rank, cut=cut, agrees=not differs)
        if differs:
            known = partial(
                self._known_grads, expected, rank=rank, name=name, start=part.place.start
            )
            factors = self._factors(expected)
            found = self._group.differing(at(), grad, part.grad, known=known, factors=factors)
            # If these are the bits at another point of the step, propose to declare it.
            side = hint_of_other_point(
                expected, name, cut, part.grad, numerics=self._group.numerics
            )
            yield replace(found, detail="\n".join(filter(None, [found.detail, side])))

    def _compare_with_one(
        self, one: Tensor, part: OwnedPart, *, divisor: float, at: tuple[int, int]
    ) -> Iterator[Finding]:
        """Compare a part's mean over the ranks with the gradient on one device."""
        assert part.grad is not None
        got, owed = part.grad, one
        if divisor != 1:
            # The reported value is a sum, so divide it here, in fp32 as the reference does.
            owed = one.to(torch.float32)
            got = got if self._group.reports_divided else quotient(got.to(torch.float32), divisor)
        if self._comparer.differs(owed, got):
            found = findings.owned(Check.INVARIANT_ONE_DEVICE, "", *at, part.place)
            found = self._group.differing(found, owed, got)
            ranks = self._group.scenario.world.size
            share = f"{found.differ_count} of {found.compared_count} elements differ"
            why = f"dividing by {ranks}, or adding {ranks} times, may round"
            yield replace(found, message=f"{found.message}; {share}: {why}")

    def compare_reported(self, engine: EngineAdapter, *, rank: int, step: int) -> Iterator[Finding]:
        """Compare gradients of whole params, if the target declares that it reports them."""
        group = self._group
        if PARTS in group.unobserved:
            group.note_unreported(divisor=self._steps[step].divisor)
        if not group.shows_grads_of_params:
            return
        reported = engine.gradients()
        # In param order, because the order of sets differs between processes.
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
            self._note_grad(self._steps[step], name, got, rank=rank, cut=_whole, agrees=not differs)
            # Note agreeing gradients too, because a rule must fit all gradients.
            if differs:
                at = findings.gradient(step, rank, name)
                known = partial(self._known_grads, self._steps[step], rank=rank, name=name, start=0)
                factors = self._factors(self._steps[step])
                found = self._group.differing(at, wanted, got, known=known, factors=factors)
                side = hint_of_other_point(
                    self._steps[step], name, _whole, got, numerics=group.numerics
                )
                yield replace(found, detail="\n".join(filter(None, [found.detail, side])))

    def _known_grads(
        self, expected: ReferenceStep, *, rank: int, name: str, start: int
    ) -> Iterator[Known]:
        """Yield candidates for a reduced gradient: partial sums, and other params' gradients."""
        explainer = self._explanations.of(expected)
        if explainer is not None:
            yield from explainer.known_grads(name, rank=rank, start=start)
        # A system may swap gradients, so all params are candidates.
        grads_reported = {each: self._as_reported(expected, each) for each in expected.grads}
        yield from _of_params(
            {n: v for n, v in grads_reported.items() if v is not None}, start=start
        )

    def _factors(self, expected: ReferenceStep) -> FactorCauses:
        """Return causes of a common factor in gradients, as the target reports them."""
        division = expected.update.division
        # The reported value is a sum if a division follows the report.
        is_sum = division.rest != 1 and not self._group.reports_divided and not division.each_round
        return self._factors_of(expected, is_mean=not is_sum)

    def _factors_of(
        self, expected: ReferenceStep, *, is_mean: bool, noun: str = "the {}"
    ) -> FactorCauses:
        return FactorCauses.of(
            expected.losses,
            divisor=1 if expected.update.division.how == "none" else expected.update.division.count,
            replicas=self._group.scenario.system.redundancy,
            is_mean=is_mean,
            noun=noun,
        )

    def _as_reported(self, expected: ReferenceStep, name: str) -> Tensor | None:
        """Return a reduced gradient in the target's form; None if it has none in this step."""
        dtype = self._group.numerics.reported_dtype
        return as_reported(expected, name, point=self._reported_at, dtype=dtype)

    def _note_grad(
        self,
        expected: ReferenceStep,
        name: str,
        got: Tensor,
        *,
        rank: int,
        cut: Callable[[Tensor], Tensor],
        agrees: bool,
    ) -> None:
        """Record a gradient for explanations; clipped gradients cannot be explained by rules."""
        if self._reported_at != "after-clip":
            numerics = self._group.numerics
            observation, shown = grad_seen(name, got, cut=cut, rank=rank, numerics=numerics)
            self._explanations.note(expected, observation, shown, agrees=agrees)

    def compare_params(
        self, params: Mapping[str, Tensor], *, rank: int, step: int
    ) -> Iterator[Finding]:
        """Compare all working params that a rank holds, including those of other owners."""
        for name, value in self._steps[step].params.items():
            if name not in self._group.ownership.held[rank]:
                continue
            if name not in params:
                at = findings.param(step, rank, name)
                yield findings.missing(at, "the system does not have this param")
                continue
            got, expected = params[name], self._steps[step]
            if self._adoption is not None and not self._adoption.see_param(name, got, expected):
                return
            differs = self._comparer.differs(value, params[name])
            if differs:
                at = findings.param(step, rank, name)
                if PARTS in self._group.unobserved:
                    # Without parts, only params show differences between layouts.
                    at = self._group.of_layouts(at)
                known = partial(_known_params, self._steps[step], name=name)
                yield self._group.differing(at, value, params[name], known=known)
            if not self._steps[step].skipped:
                # A skipped step computes nothing that a rule could explain.
                observation, got = param_seen(name, params[name], rank=rank)
                self._explanations.note(self._steps[step], observation, got, agrees=not differs)

    def add_to(self, judged: JudgeReport) -> JudgeReport:
        """Add the rules that fit the differences to a report."""
        rules = self._explanations.tried(judged.bad_step)
        return replace(judged, rules=rules, unfollowed=self._source.unfollowed)


def _whole(tensor: Tensor) -> Tensor:
    return tensor


def _of_params(values: Mapping[str, Tensor], *, start: int) -> Iterator[Known]:
    """Yield all params' expected values as candidates, at this position and elsewhere."""
    for name, value in values.items():
        what = f"the expected value of param {name!r}"
        yield Known(what=what, values=value, start=start, name=name)


def _known_params(expected: ReferenceStep, *, name: str) -> Iterator[Known]:
    """Yield candidates for a working param: its previous value, and other params' values."""
    if name in expected.params_before:
        yield Known(what="that from before the step", values=expected.params_before[name])
    yield from _of_params(expected.params, start=0)


def _known_updates(expected: ReferenceStep, key: str, *, name: str, start: int) -> Iterator[Known]:
    """Yield candidates for a state key, or for the master if the key is empty."""
    if key:
        for other, value in expected.state[name].items():
            if value.dim() and other != key:
                what = f"the expected optimizer state {other!r}"
                yield Known(what=what, values=value, start=start)
        # Then this key of other params. Counters are no evidence: they are equal in all params.
        of_key = {each: state[key] for each, state in expected.state.items() if key in state}
        yield from _of_params({n: v for n, v in of_key.items() if v.dim()}, start=start)
        return
    if name in expected.masters_before:
        before = expected.masters_before[name]
        yield Known(what="that from before the step", values=before, start=start)
    yield from _of_params(expected.masters, start=start)
