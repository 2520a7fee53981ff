"""The update of a part of a param from a gradient that somebody else reduced.

Where the order of addition is not known, neither are the bits of a sum; but all that the optimizer
does with them is. It is done element by element, so that a part can be stepped by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zero_sim.reference.division import Division, quotient
from zero_sim.reference.gradient import Measure, measure
from zero_sim.reference.rules import Rules, clip_by_rule_
from zero_sim.reference.stepping import Stepper
from zero_sim.scenario.spec import OptimizerSpec

if TYPE_CHECKING:
    from zero_sim.reference.cuts import CutStep

_REPEATED_STEPS = 2
"""Steps of a target's rule that are checked by taking them twice: the second one has state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """What one step does to every gradient."""

    division: Division
    scale: float | None
    """What losses were multiplied by."""
    lr_factor: float

    @property
    def divisor(self) -> float:
        """Divisor for sums: 1 if nothing is done after them."""
        return 1 if self.division.each_round else self.division.rest

    def apply(self, total: Tensor) -> Tensor:
        """Divide and unscale a sum, in fp32; returns a copy.

        Args:
            total: The sum over ranks, in any shape; not changed.
        """
        division = self.division
        if division.is_rounded and self.divisor != 1:
            total = division.after(total)
        wide = total.to(torch.float32, copy=True)
        if self.scale is not None:
            wide = quotient(wide, self.scale)
        if self.divisor != 1:
            division.after_(wide)
        return wide


class Follower:
    """A part of a param and its optimizer state, moved by the gradients that it is told.

    Args:
        spec: Optimizer, clipping and their settings.
        name: Name of the param, which decides its group.
        master: Initial values, copied; 1D, or for a rule that reads the number of dimensions of
            that number, all but the last of size 1.
        rules: Of these only how a gradient is clipped by its norm; not a form that takes the root.
        on_host: As in `Stepper`.
        counters: As in `Probe`.
    """

    def __init__(
        self,
        spec: OptimizerSpec,
        *,
        name: str,
        master: Tensor,
        rules: Rules | None = None,
        on_host: bool = False,
        counters: frozenset[str] = frozenset(),
    ) -> None:
        self._spec, self._name = spec, name
        self._rules = rules or Rules()
        self._stepper = Stepper(spec, params={name: master}, on_host=on_host, rules=self._rules)
        self._counters = counters
        self._taken: CutStep | None = None
        self._repeats_left = _REPEATED_STEPS

    @property
    def master(self) -> Tensor:  # 1D fp32
        """The master; live."""
        return self._stepper.masters[self._name].reshape(-1)

    @property
    def cut_step(self) -> CutStep | None:
        """The last step, to take it cut; None for any rule but an elementwise one of a target."""
        return self._taken

    def adopt(self, index: Tensor, values: Mapping[str, Tensor]) -> None:
        """Go on with other bits that the target's rule gives; see `Reference.adopt`."""
        self._stepper.put(self._name, index, values)

    @property
    def state(self) -> Mapping[str, Tensor]:
        """The optimizer's state by torch's key; live, and empty before the first step."""
        held = self._stepper.state()[self._name]
        return {key: value.reshape(-1) if value.dim() else value for key, value in held.items()}

    def step(
        self, grad: Tensor, *, update: Update, norm: Tensor | None, divided: bool = False
    ) -> Measure:
        """Take one step in place.

        Args:
            grad: 1D, gradient dtype: the sum over ranks, not unscaled; not changed.
            update: What the step does.
            norm: 0D fp32, the norm of the whole gradient; None where nothing is clipped by it.
            divided: Whether that sum is divided already, where the division comes after it.

        Returns:
            What the gradient looks like, unscaled and divided, before it is clipped.
        """
        wide = grad.to(torch.float32, copy=True)
        if update.scale is not None:
            wide = quotient(wide, update.scale)
        if not divided:
            update.division.after_(wide)
        measured = measure(wide)
        if self._spec.clip_value is not None:
            wide.clamp_(-self._spec.clip_value, self._spec.clip_value)
        if self._spec.clip_norm is not None and norm is not None:
            told = replace(measured, norm=norm)
            clip_by_rule_(wide, measured=told, norm_max=self._spec.clip_norm, rules=self._rules)
        wide = wide.view_as(self._stepper.masters[self._name])
        if self._rules.own is not None and self._rules.own.elementwise:
            # Here, because hardly any case needs it.
            from zero_sim.reference.cuts import CutStep

            self._taken = CutStep(
                start=self._stepper.fork(),
                name=self._name,
                grad=wide,
                factor=update.lr_factor,
                counters=self._counters,
            )
        self._stepper.step(
            {self._name: wide}, factor=update.lr_factor, repeated=self._repeats_left > 0
        )
        self._repeats_left -= 1
        return measured
