"""Alternatives to a step: other rules (one or two changes), or incomplete sums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, combinations, product
from typing import Any, get_args

from zero_sim.findings.compare import same_bits
from zero_sim.reference import (
    CLIP_FORMS,
    DIVIDE_RULES,
    NORMS,
    POSITION_FREE,
    ROOTED,
    Again,
    ClipForm,
    ClipFunction,
    Norm,
    Rules,
    ScaleLoss,
    StepAgain,
    Terms,
    takes_root,
)
from zero_sim.reference.division import DivideBy
from zero_sim.reference.oracle import KEPT_ELEMS_MAX

LOCAL = Terms(is_local=True)
"""Terms from a single rank, as if gradients were not reduced."""

Change = Mapping[str, Any]
"""New values for some fields in a target's declaration, by name."""

# Every known choice, with the fields that declare it.
_COUNTS: tuple[DivideBy, ...] = ("ranks", "micro-batches", "tokens")
_FACTORS: tuple[ScaleLoss | None, ...] = (None, *get_args(ScaleLoss))
_ROUNDS: tuple[Change, ...] = (
    {"sync": "last"},
    {"sync": "every"},
    {"sync": "every", "divide_each": "round"},
    {"sync": "every-in-block"},
)
_DTYPES: tuple[Change, ...] = (
    {"grad_dtype": "param"},
    {"grad_dtype": "fp32"},
    {"accumulate_dtype": "fp32", "reduce_dtype": "param"},
    {"accumulate_dtype": "param", "reduce_dtype": "fp32"},
    {"reduce_dtype": "bf16"},
    {"reduce_dtype": "fp16"},
)
# The second sum, over shard groups, exists only with replicas.
_COPIES: tuple[Change, ...] = ({"replica_dtype": "fp32"}, {"replica_dtype": "bf16"})


@dataclass(frozen=True, kw_only=True)
class SumRules:
    """Alternatives for gradient sums."""

    again: Again

    @classmethod
    def of(cls, again: Again) -> SumRules | None:
        """Return the alternatives for a step; None if there are too many elements to try them."""
        ranks, micros = len(again.replays), again.scenario.run.micro_batches
        # Every alternative adds all ranks' micro-batches once more.
        elems = sum(grad.numel() for grad in again.taken.grads.values())
        return cls(again=again) if elems * ranks * micros <= KEPT_ELEMS_MAX else None

    @property
    def assumed(self) -> str:
        """The reference's rules, in words."""
        return in_words(self._assumed)

    @cached_property
    def _assumed(self) -> dict[str, object]:
        rules, system = self.again.rules, self.again.scenario.system
        named: dict[str, object] = {
            "divide": rules.divide or system.divide,
            "divide_by": rules.divide_by or system.divide_by,
            "sync": rules.sync or system.sync,
            "grad_dtype": system.grad_dtype,
        }
        # Only fields with a value, as in a declaration.
        of_losses = ("scale_loss", "scale_second")
        of_sums = ("predivide_by", "accumulate_dtype", "reduce_dtype", "replica_dtype")
        for name in (*of_losses, *of_sums):
            if getattr(rules, name) is not None:
                named[name] = getattr(rules, name)
        if rules.divide_each != "step":
            named["divide_each"] = rules.divide_each
        return named

    def singles(self) -> dict[str, StepAgain]:
        """Return the step under rules with one change."""
        return self._by((change,) for thing in self._things for change in thing)

    def pairs(self) -> dict[str, StepAgain]:
        """Return the step under rules with two changes, or with other loss factors."""
        # Factors come late, because each costs another backward. Divisors that are powers of two
        # give the same bits.
        again = self.again
        cp, has_second = again.scenario.topology.cp, again.replays[0].has_second_loss
        # With one context-parallel rank, these two factors are 1.
        factors = [each for each in _FACTORS if cp > 1 or each not in ("cp", "1/cp")]
        # First the factor for any second loss, then the factor for all losses.
        names = ("scale_second", "scale_loss") if has_second else ("scale_loss",)
        scales = [{name: factor} for name in names for factor in factors]
        scales = [change for change in scales if self._differs(change)]
        divisions = [change for thing in self._things[:2] for change in thing]
        # Alone, or with another division.
        scaled = product(scales, ({}, *divisions))
        two = (product(first, second) for first, second in combinations(self._things, 2))
        return self._by(chain(scaled, *two))

    @cached_property
    def _things(self) -> list[list[Change]]:
        """Changes, by topic."""
        scenario = self.again.scenario
        things: list[Sequence[Change]] = [
            [{"divide": rule} for rule in DIVIDE_RULES],
            [{"divide_by": count} for count in _COUNTS],
        ]
        # With a single micro-batch, all accumulation rules give the same bits.
        if scenario.run.micro_batches > 1:
            things.append(_ROUNDS if scenario.system.redundancy > 1 else _ROUNDS[:-1])
        things.append((*_DTYPES, *_COPIES) if scenario.system.redundancy > 1 else _DTYPES)
        # Without the assumed rules, which do not fit.
        return [[change for change in thing if self._differs(change)] for thing in things]

    def _differs(self, change: Change) -> bool:
        return any(self._assumed.get(name) != value for name, value in change.items())

    def _by(self, changes: Iterator[tuple[Change, ...]]) -> dict[str, StepAgain]:
        # A later change to the same field wins.
        joined = [
            {name: value for each in some for name, value in each.items()} for some in changes
        ]
        return {in_words(change): self.again.by(self._changed(change)) for change in joined}

    def _changed(self, change: Change) -> Rules:
        """Return the reference's rules with a change."""
        rules = self.again.rules
        # A declared `grad_dtype` stands for both dtypes.
        if "grad_dtype" in change:
            dtype = change["grad_dtype"]
            rules = replace(rules, accumulate_dtype=dtype, reduce_dtype=dtype)
        # Replaced fields, as in `declared.with_change`.
        if "sync" in change:
            rules = replace(rules, divide_each="step")
        plain = {name: value for name, value in change.items() if name != "grad_dtype"}
        if "divide_by" in plain:
            plain["divide_by"] = self.again.count(plain["divide_by"])
        if "divide" in plain:
            plain["predivide_by"] = None
        return replace(rules, **plain)


@dataclass(frozen=True, kw_only=True)
class UpdateRules:
    """Alternatives for an update: clipping, unused params, and sums."""

    again: Again
    sums: SumRules | None

    @property
    def assumed(self) -> str:
        """The reference rule most likely to differ, in words."""
        if self._clips:
            return _declared(self.again.rules.clip)
        return f"unused = {self.again.rules.unused!r}" if self.sums is None else self.sums.assumed

    def singles(self) -> dict[str, StepAgain]:
        """Return the step under rules with one change."""
        rules = self.again.rules
        clips = self._other_clips
        found = {_declared(clip): replace(rules, clip=clip) for clip in clips}
        # Unused params, alone and together with a clip form.
        if self.again.unused:
            unused = "zeros" if rules.unused == "left-alone" else "left-alone"
            other, name = replace(rules, unused=unused), f"unused = {unused!r}"
            found[name] = other
            found |= {f"{name}, {_declared(clip)}": replace(other, clip=clip) for clip in clips}
        steps = {name: self.again.by(each) for name, each in found.items()}
        return steps | ({} if self.sums is None else self.sums.singles())

    def pairs(self) -> dict[str, StepAgain]:
        """Return the step under rules with two changes."""
        return {} if self.sums is None else self.sums.pairs()

    @property
    def _clips(self) -> bool:
        """True if some clip form may change a gradient."""
        bound = self.again.scenario.optimizer.clip_norm
        # Forms differ by a few ulp, so no form clips a norm below half the bound.
        return bound is not None and not bool(self.again.taken.norm < bound / 2)

    @cached_property
    def _other_clips(self) -> list[ClipForm]:
        """Clip forms with other bits than the reference's form."""
        rules, taken = self.again.rules, self.again.by().step
        if not self._clips:
            return []
        # Norms of norms have no unrounded root.
        has_root = rules.norm in ROOTED
        forms = [form for form in CLIP_FORMS if has_root or not takes_root(form)]
        return [
            form
            # Compare results, because forms often agree.
            for form in forms
            if not _same(self.again.by(replace(rules, clip=form)).step.stepped, taken.stepped)
        ]


def norm_steps(again: Again) -> dict[str, StepAgain]:
    """Return the step under other norm rules."""
    rules = again.rules
    # In other orders, positions in the squares' call are unknown.
    is_free = again.scenario.world.order in POSITION_FREE
    known: Sequence[Norm] = NORMS if is_free else ("of-elements", "of-params")
    # Norms over owned parts need reported ownership.
    unknown = () if any(again.holdings) else ("of-own-params", "of-shards", "of-squares")
    others = [norm for norm in known if norm not in (rules.norm, "reported", *unknown)]
    return {f"norm = {norm!r}": again.by(replace(rules, norm=norm)) for norm in others}


def partial_sums(again: Again) -> dict[str, Terms]:
    """Return terms that a faulty system may add, most likely first.

    The keys name the terms, such as `the last micro-batch alone`.
    """
    replays = again.replays
    micros = max((len(replay.micro_grads) for replay in replays), default=0)
    some = {name: Terms(micros=each) for name, each in _some_of(micros)}
    # A single rank reduces nothing.
    if len(replays) == 1:
        return some
    found = {"this rank alone, not reduced": LOCAL, **some}
    for name, terms in some.items():
        found[f"{name}, of this rank, not reduced"] = replace(terms, is_local=True)
    # Without reduction the division may be missing, too.
    if again.by().division.how != "none":
        local = {name: terms for name, terms in found.items() if terms.is_local}
        for name, terms in local.items():
            found[f"{name} and not divided"] = replace(terms, is_divided=False)
    return found


def _some_of(micros: int) -> Iterator[tuple[str, frozenset[int]]]:
    """Yield subsets of micro-batches that a system may keep, the last micro-batch first."""
    if micros < 2:
        return
    words = {0: "the first micro-batch", micros - 1: "the last micro-batch"}
    for micro in reversed(range(micros)):
        yield f"{words.get(micro, f'micro-batch {micro}')} alone", frozenset({micro})
    for micro in range(micros) if micros > 2 else ():
        others = frozenset(range(micros)) - {micro}
        yield f"all micro-batches but {words.get(micro, str(micro))}", others


def in_words(change: Change) -> str:
    """Return fields and values as a declaration: `divide = 'pre', sync = 'every'`."""
    return ", ".join(f"{name} = {value!r}" for name, value in change.items())


def _declared(clip: ClipForm | ClipFunction) -> str:
    return "clip, a function of its own" if callable(clip) else f"clip = {clip!r}"


def _same(grads: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    return all(same_bits(grad, others[name]) for name, grad in grads.items())
