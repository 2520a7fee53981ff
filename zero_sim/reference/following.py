"""Updates for parts of params, from gradients that the system reduced.

If the summation order is unknown, so are a sum's bits. The optimizer's arithmetic on these bits is
known and elementwise, so each part can be stepped separately.
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

# Steps in which a target's rule runs twice, as a check. Only the second has state to start from.
_REPEATED_STEPS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """Division, loss scale and learning-rate factor of one step."""

    division: Division
    scale: float | None
    """Loss scale; None without loss scaling."""
    lr_factor: float

    @property
    def divisor(self) -> float:
        """Divisor for sums; 1 if no division follows the sum."""
        return 1 if self.division.each_round else self.division.rest

    def apply(self, total: Tensor) -> Tensor:
        """Return a sum over ranks, divided and unscaled in fp32; a copy."""
        division = self.division
        # A rounded division is in the sum's dtype, hence before the conversion.
        if division.is_rounded and self.divisor != 1:
            total = division.after(total)
        wide = total.to(torch.float32, copy=True)
        # Unscale before the division, as the whole reference does.
        if self.scale is not None:
            wide = quotient(wide, self.scale)
        if self.divisor != 1:
            division.after_(wide)
        return wide


class Follower:
    """A part of a param and its optimizer state, stepped with the system's gradients.

    Args:
        spec: Optimizer, clipping and their settings.
        name: Param name, which decides the group.
        master: Initial values, copied. 1D, or with leading dimensions of size 1 for a rule that
            reads the number of dimensions.
        rules: Only the target's own rule, the dtype of masters and the clipping by norm are used.
            The clip form must not take the root.
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
        """The last step, to repeat with cuts; None unless a target's elementwise rule took it."""
        return self._taken

    def adopt(self, index: Tensor, values: Mapping[str, Tensor]) -> None:
        """Continue from other bits that the target's rule may give; see `Reference.adopt`."""
        self._stepper.put(self._name, index, values)

    @property
    def state(self) -> Mapping[str, Tensor]:
        """Optimizer state by torch key; live, and empty before the first step."""
        held = self._stepper.state()[self._name]
        # 1D like the part; scalars, such as step counts, stay.
        return {key: value.reshape(-1) if value.dim() else value for key, value in held.items()}

    def step(
        self, grad: Tensor, *, update: Update, norm: Tensor | None, divided: bool = False
    ) -> Measure:
        """Take one step in place.

        Args:
            grad: 1D, gradient dtype: the sum over ranks, still scaled; not changed.
            update: This step's division and factors.
            norm: Whole-gradient norm, 0D fp32; None without clipping by norm.
            divided: True if the sum is already divided, although the rule divides after the sum.

        Returns:
            Measure of the gradient, unscaled and divided, before clipping.
        """
        # 1D, fp32: a copy, because the steps below are in place.
        wide = grad.to(torch.float32, copy=True)
        if update.scale is not None:
            wide = quotient(wide, update.scale)
        if not divided:
            update.division.after_(wide)
        measured = measure(wide)
        # By value before by norm, as the whole reference does.
        if self._spec.clip_value is not None:
            wide.clamp_(-self._spec.clip_value, self._spec.clip_value)
        # The norm covers all params; this part only has a share of it.
        if self._spec.clip_norm is not None and norm is not None:
            reported = replace(measured, norm=norm)
            clip_by_rule_(wide, measured=reported, norm_max=self._spec.clip_norm, rules=self._rules)
        # Back to the number of dimensions that the rule reads.
        wide = wide.view_as(self._stepper.masters[self._name])
        if self._rules.own is not None and self._rules.own.elementwise:
            # Imported here, because hardly any case needs it.
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
