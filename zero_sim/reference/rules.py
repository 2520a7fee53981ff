"""Rules of arithmetic, for choices that a scenario leaves open.

All rules for one choice agree in mathematics and differ in rounding. Targets declare them by the
same names.
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
"""Dtype of gradients: `param` for that of each param's own gradient, or one dtype for all."""
DivideEach = Literal["step", "round"]
"""Sum to divide: that of all rounds, or each round's."""
Sync = Literal["last", "every", "every-in-block"]
"""Accumulation rule. `every-in-block`: each micro-batch is summed within each shard group, and the
sum of all micro-batches over these, once."""
Unused = Literal["zeros", "left-alone"]
"""Treatment of a param that no rank used in a step. `zeros`: stepped with a gradient of zeros.
`left-alone`: value and state stay, and it counts in no norm."""
NonFiniteRule = Literal["stepped", "skipped", "raises"]
"""Treatment of a step with NaN or infinite gradients, without loss scaling. With `raises`, as with
`skipped`, nothing is updated."""
Masters = Literal["fp32", "param"]
"""Dtype of stepped params: `fp32` for a master of each param, `param` for the working param
itself."""
ClipFunction = Callable[[Tensor, float], Tensor | float]
"""Returns the factor of gradients, given a 0-D fp32 norm and its bound."""

_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """Rules of the reference; None for the scenario's setting."""

    scale_loss: ScaleLoss | ScaleLossFunction | None = None
    """Factor of each loss before its backward; None for 1."""
    scale_second: ScaleLoss | ScaleLossFunction | None = None
    """Factor of a second loss, in place of `scale_loss`; None for the same factor."""
    divide: DivideRule | None = None
    divide_by: float | None = None
    """Divisor in place of the scenario's count."""
    predivide_by: float | None = None
    """Divisor of each rank before the sum; the sum is then divided by the rest."""
    divide_each: DivideEach = "step"
    sync: Sync | None = None
    accumulate_dtype: GradDtype | None = None
    """Dtype in which a rank adds its micro-batches, or the sums of rounds if each is summed."""
    reduce_dtype: GradDtype | None = None
    """Dtype of the sum over ranks."""
    copies_dtype: GradDtype | None = None
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
        """True if the clip form needs the root of the sum of squares."""
        return self.known_clip is not None and takes_root(self.known_clip)


def dtype_named(name: GradDtype | None) -> torch.dtype | None:
    """Return the dtype of a name; None for each param's own.

    Args:
        name: A name; both `param` and None mean the param's own dtype.
    """
    # `param` has no entry.
    return _DTYPES.get(name or "param")


def clip_by_rule_(flat: Tensor, *, measured: Measure, norm_max: float, rules: Rules) -> None:
    """Clip a gradient in place by its norm.

    Args:
        flat: 1-D fp32.
        measured: Measure of the whole gradient.
        norm_max: Norm bound.
        rules: Rules, with a clip form or the target's own function.
    """
    if callable(rules.clip):
        # A copy, because the function is foreign code and may write to it.
        factor = torch.as_tensor(rules.clip(measured.norm.clone(), norm_max))
        # In fp32, whatever dtype or number the function returns.
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
