"""Arithmetic rules for choices that a scenario leaves open.

Most rules for a choice are equal in mathematics but round differently. Targets declare the same
names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from zero_sim.reference.clipping import ClipForm, clip_by_norm_, takes_root
from zero_sim.reference.division import DivideRule
from zero_sim.reference.gradient import Measure
from zero_sim.reference.norms import Norm
from zero_sim.reference.own_rule import OwnRule
from zero_sim.reference.scaling import ScaleLoss, ScaleLossFunction

GradDtype = Literal["param", "fp32", "bf16", "fp16"]
"""Gradient dtype: `param` for each param's own gradient dtype, or a single dtype for all."""
DivideEach = Literal["step", "round"]
"""Sum to divide: the step's total, or each round's sum."""
Sync = Literal["last", "every", "every-in-block"]
"""When ranks are summed: after the `last` micro-batch or after `every` micro-batch. With
`every-in-block`, shard groups sum every micro-batch, and a single sum over the groups follows."""
Unused = Literal["zeros", "left-alone"]
"""Handling of a param that no rank used in a step. `zeros`: it is stepped with a zero gradient.
`left-alone`: it keeps value and state, and counts in no norm."""
NonFiniteRule = Literal["stepped", "skipped", "raises"]
"""Handling of a step with NaN or infinite gradients if there is no loss scaling. Neither `skipped`
nor `raises` updates anything."""
Masters = Literal["fp32", "param"]
"""Params that the optimizer steps: fp32 masters, or the working params themselves (`param`)."""
ClipFunction = Callable[[Tensor, float], Tensor | float]
"""Returns the gradient factor, given the 0-D fp32 norm and its bound."""

_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """Rules of the reference; None for the scenario's setting."""

    scale_loss: ScaleLoss | ScaleLossFunction | None = None
    """Factor for each loss before backward; None for 1."""
    scale_second: ScaleLoss | ScaleLossFunction | None = None
    """Factor for a second loss; None to use `scale_loss`."""
    divide: DivideRule | None = None
    divide_by: float | None = None
    """Divisor in place of the scenario's count."""
    predivide_by: float | None = None
    """Divisor on each rank before the sum. The sum is then divided by the rest."""
    divide_each: DivideEach = "step"
    sync: Sync | None = None
    accumulate_dtype: GradDtype | None = None
    """Dtype in which a rank adds its micro-batches, or round sums if every round is reduced."""
    reduce_dtype: GradDtype | None = None
    """Dtype of the sum over ranks."""
    replica_dtype: GradDtype | None = None
    """Dtype of the sum over shard groups."""
    unused: Unused = "zeros"
    nonfinite: NonFiniteRule = "stepped"
    norm: Norm = "of-elements"
    clip: ClipForm | ClipFunction = "fp32-division"
    masters: Masters = "fp32"
    own: OwnRule | None = None
    """The target's update rule, for optimizer `own`."""

    @property
    def known_clip(self) -> ClipForm | None:
        """The clip form; None for a target's own function."""
        return None if callable(self.clip) else self.clip

    @property
    def takes_root(self) -> bool:
        """True if the clip form needs the unrounded root."""
        return self.known_clip is not None and takes_root(self.known_clip)


def dtype_named(name: GradDtype | None) -> torch.dtype | None:
    """Return a dtype by name; None for each param's own dtype (`param` or None)."""
    # `param` has no entry.
    return _DTYPES.get(name or "param")


def clip_by_rule_(flat: Tensor, *, measured: Measure, norm_max: float, rules: Rules) -> None:
    """Clip a 1-D fp32 gradient in place by its norm, in the rules' form or with their function."""
    if callable(rules.clip):
        # A copy, because the function is foreign code and may write to it.
        factor = torch.as_tensor(rules.clip(measured.norm.clone(), norm_max))
        # The function may return any dtype or a Python number, so convert.
        flat.mul_(factor.to(device=flat.device, dtype=torch.float32))
        return
    clip_by_norm_(
        flat,
        norm=measured.norm,
        norm_max=norm_max,
        form=rules.clip,
        # Not sqrt(): Megatron-LM takes `total_norm.item() ** (1.0 / norm_type)`.
        root=measured.squares**0.5,
    )
