"""Alternative steps: what other known rules would have given from the same gradient and state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from zero_sim.reference.adding import POSITION_FREE, AddOrder
from zero_sim.reference.clipping import CLIP_FORMS, ClipForm, clip_factor, takes_root
from zero_sim.reference.division import quotient
from zero_sim.reference.gradient import Measure, flatten_wide, unflatten
from zero_sim.reference.norms import NORMS, ROOTED, Holdings
from zero_sim.reference.other_sums import OtherSum, OtherSums
from zero_sim.reference.quantization import WorkingParams
from zero_sim.reference.replay import isolated
from zero_sim.reference.rules import ClipFunction, Rules, clip_by_rule_
from zero_sim.reference.stepping import Stepper


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherUpdate:
    """What the optimizer makes of a step by one rule."""

    masters: Mapping[str, Tensor]  # each ND, fp32
    state: Mapping[str, Mapping[str, Tensor]]
    """By param and torch's key."""
    params: Mapping[str, Tensor]  # each ND, working dtype


@dataclass(frozen=True, kw_only=True)
class Otherwise:
    """What an update started from, and the rules by which it could have gone on.

    A rule is named as a target declares it: `clip = 'fp64-division'`.
    """

    before: Callable[[], Stepper]
    """Gives a stepper as it was before the update."""
    grads: Mapping[str, Tensor]  # each ND, fp32
    """The master gradient of what is trained in the step, not clipped."""
    sums: OtherSums | None
    """What it could have been."""
    unused: Sequence[str]
    """Names of params that no rank used."""
    measured: Measure
    measure: Callable[..., Measure]
    """Measures a flat gradient, by a rule for its norm."""
    clip_norm: float | None
    clip_value: float | None
    scale: float | None
    """What losses were multiplied by."""
    followed: Rules
    """Those that were assumed."""
    order: AddOrder
    """In which calls add over the ranks."""
    factor: float
    """What learning rates are multiplied by."""
    working: WorkingParams
    holdings: Callable[[], Holdings]
    """Gives the parts of params that each rank owns; none if nobody reported them."""

    @property
    def assumed(self) -> str:
        """The rule that the reference followed."""
        if self._clips:
            return _declared(self.followed.clip)
        if self.sums is not None:
            return self.sums.assumed
        return f"unused = {self.followed.unused!r}"

    def singles(self) -> Sequence[str]:
        """All other rules that give other bits than the one that was assumed."""
        clips = [_declared(f) for f in self._forms() if self._number(f) != self._assumed_number]
        used = [self._other_use] if self.unused else []
        both = [f"{used[0]}, {clip}" for clip in clips] if used else []
        return [*clips, *used, *both, *self._divisions]

    @cached_property
    def _divisions(self) -> Sequence[str]:
        if self.sums is None:
            return ()
        return self.sums.singles()

    def pairs(self) -> Sequence[str]:
        """Rules that differ in two things."""
        return self.sums.pairs() if self.sums is not None else ()

    @cached_property
    def _other_use(self) -> str:
        other = "zeros" if self.followed.unused == "left-alone" else "left-alone"
        return f"unused = {other!r}"

    def update(self, rule: str) -> OtherUpdate:
        """Take the update anew.

        Args:
            rule: One of `singles` or `pairs`, or the one that was assumed.
        """
        form, grads, measured = self.followed.clip, dict(self.grads), self.measured
        with isolated():
            if rule != self.assumed:
                form = next((f for f in self._forms() if _declared(f) in rule), form)
                grads, measured = self._gradient(rule)
            return self._taken(grads, measured, form=form)

    def update_by(self, sums: Mapping[str, OtherSum]) -> OtherUpdate:
        """Take the update anew from other gradients, by the rules that were assumed.

        Args:
            sums: By param; one without an entry keeps its value.
        """
        with isolated():
            grads = {name: self._wide(sums[name]) for name in self.grads if name in sums}
            measured = self.measure(flatten_wide(grads, names=list(grads)), active=list(grads))
            return self._taken(grads, measured, form=self.followed.clip)

    def _taken(
        self, grads: Mapping[str, Tensor], measured: Measure, *, form: ClipForm | ClipFunction
    ) -> OtherUpdate:
        flat = flatten_wide(grads, names=list(grads)).clone()
        stepper = self.before()
        if self.clip_value is not None:
            flat.clamp_(-self.clip_value, self.clip_value)
        if self.clip_norm is not None:
            rules = replace(self.followed, clip=form)
            clip_by_rule_(flat, measured=measured, norm_max=self.clip_norm, rules=rules)
        stepper.step(unflatten(flat, like=grads), factor=self.factor)
        masters = stepper.masters
        params = {
            name: self.working.cast(name, masters[name], is_stepped=name in grads)
            for name in masters
        }
        return OtherUpdate(masters=masters, state=stepper.state(), params=params)

    def _gradient(self, rule: str) -> tuple[dict[str, Tensor], Measure]:
        """The master gradient by another rule, and what is measured of it."""
        grads, masters = dict(self.grads), self.before().masters
        if self._other_use in rule:
            for name in self.unused:
                if self.followed.unused == "left-alone":
                    grads[name] = torch.zeros_like(masters[name])
                else:
                    del grads[name]
            order = [name for name in masters if name in grads]
            grads = {name: grads[name] for name in order}
        elif self.sums is not None and not rule.startswith("clip"):
            grads = {name: self._summed(rule, name) for name in grads}
        else:
            return grads, self.measured
        flat = flatten_wide(grads, names=list(grads))
        return grads, self.measure(flat, active=list(grads))

    def _summed(self, rule: str, name: str) -> Tensor:
        assert self.sums is not None
        return self._wide(self.sums.sum(rule, name))

    def _wide(self, other: OtherSum) -> Tensor:
        """The fp32 gradient that comes of a sum."""
        total, division = other.total, other.division
        if division.is_rounded:
            total = division.after(total)
        wide = total.to(torch.float32, copy=True)
        if self.scale is not None:
            wide = quotient(wide, self.scale)
        division.after_(wide)
        return wide

    def norms(self) -> dict[str, Tensor]:
        """The norm by each other rule, by what is declared then."""
        flat = flatten_wide(self.grads, names=list(self.grads))
        # Where an order depends on positions, nothing is known of a call that adds squares.
        known = NORMS if self.order in POSITION_FREE else ("of-elements", "of-params")
        unknown = () if any(self.holdings()) else ("of-own-params", "of-shards")
        left_out = (self.followed.norm, "told", *unknown)
        others = [norm for norm in known if norm not in left_out]
        with isolated():
            found = {
                f"norm = {norm!r}": self.measure(flat, active=list(self.grads), norm=norm).norm
                for norm in others
            }
            return found | {rule: self._gradient(rule)[1].norm for rule in self._divisions}

    def _forms(self) -> Sequence[ClipForm]:
        if not self._clips:
            return ()
        # Of norms of norms no root is known that was not rounded.
        has_root = self.followed.norm in ROOTED
        return [form for form in CLIP_FORMS if has_root or not takes_root(form)]

    def _number(self, form: ClipForm) -> tuple[bool, float]:
        """What decides the bits: a number, and whether gradients are divided by it."""
        assert self.clip_norm is not None
        factor = clip_factor(
            self.measured.norm,
            norm_max=self.clip_norm,
            form=form,
            root=self.measured.squares**0.5,
        )
        # Divided by 1 or multiplied by 1 is the same.
        return "quotient" in form and float(factor) != 1.0, float(factor)

    @property
    def _clips(self) -> bool:
        """Whether some form clips."""
        bound = self.clip_norm
        return bound is not None and not bool(self.measured.norm < bound / 2)

    @cached_property
    def _assumed_number(self) -> tuple[bool, float]:
        clip = self.followed.clip
        if callable(clip):
            assert self.clip_norm is not None
            factor = clip(self.measured.norm.clone(), self.clip_norm)
            return False, float(torch.as_tensor(factor, dtype=torch.float32))
        return self._number(clip)


def _declared(clip: ClipForm | ClipFunction) -> str:
    return "clip, a function of its own" if callable(clip) else f"clip = {clip!r}"
