"""Alternative steps: what another known rule would have given from the same gradient and state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zero_sim.reference.clipping import CLIP_FORMS, ClipForm, clip_factor, takes_root
from zero_sim.reference.gradient import Measure, unflatten
from zero_sim.reference.norms import ROOTED
from zero_sim.reference.quantization import encode, scale_for
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Otherwise:
    """What an update started from, and the rules by which it could have gone on.

    A rule is named as a target declares it: `clip = 'fp64-division'`.
    """

    stepper: Stepper
    """As it was before the update."""
    flat: Tensor  # 1D, fp32
    """The master gradient, not clipped."""
    measured: Measure
    norm_max: float
    followed: Rules
    """Those that were assumed."""
    factor: float
    """What learning rates are multiplied by."""
    active: Sequence[str]
    """Names of the params that are trained in the step, in the order of `flat`."""
    dtypes: Mapping[str, torch.dtype]
    """By param: of the working ones."""
    scales: Mapping[str, Tensor]
    """Of params in fp8, before the step."""

    @property
    def assumed(self) -> str:
        """The rule that the reference followed."""
        return _declared(self.followed.clip)

    def rules(self) -> Sequence[str]:
        """All other rules that give other bits than the one that was assumed."""
        return [_declared(form) for form in self._forms() if self._number(form) != self._assumed]

    def update(self, rule: str) -> OtherUpdate:
        """Take the update anew.

        Args:
            rule: One of `rules`, or the one that was assumed.
        """
        form = self.followed.clip
        if rule != self.assumed:
            form = next(form for form in self._forms() if _declared(form) == rule)
        flat, stepper = self.flat.clone(), self.stepper.fork()
        like = {name: stepper.masters[name] for name in self.active}
        with isolated():
            rules = replace(self.followed, clip=form)
            clip_by_rule_(flat, measured=self.measured, norm_max=self.norm_max, rules=rules)
            stepper.step(unflatten(flat, like=like), factor=self.factor)
            masters = stepper.masters
            params = {name: self._cast(name, masters[name]) for name in masters}
        return OtherUpdate(masters=masters, state=stepper.state(), params=params)

    def _cast(self, name: str, master: Tensor) -> Tensor:
        dtype = self.dtypes[name]
        if name not in self.scales:
            return master.to(dtype)
        scale = scale_for(master, dtype=dtype) if name in self.active else self.scales[name]
        return encode(master, scale=scale, dtype=dtype)

    def _forms(self) -> Sequence[ClipForm]:
        # Of norms of norms no root is known that was not rounded.
        has_root = self.followed.norm in ROOTED
        return [form for form in CLIP_FORMS if has_root or not takes_root(form)]

    def _number(self, form: ClipForm) -> tuple[bool, float]:
        """What decides the bits: a number, and whether gradients are divided by it."""
        factor = clip_factor(
            self.measured.norm,
            norm_max=self.norm_max,
            form=form,
            root=self.measured.squares**0.5,
        )
        # Divided by 1 or multiplied by 1 is the same.
        return "quotient" in form and float(factor) != 1.0, float(factor)

    @property
    def _assumed(self) -> tuple[bool, float]:
        if callable(self.followed.clip):
            factor = self.followed.clip(self.measured.norm.clone(), self.norm_max)
            return False, float(torch.as_tensor(factor, dtype=torch.float32))
        return self._number(self.followed.clip)


def _declared(clip: ClipForm | ClipFunction) -> str:
    return "clip, a function of its own" if callable(clip) else f"clip = {clip!r}"
