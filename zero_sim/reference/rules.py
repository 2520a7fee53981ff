"""Rules of arithmetic that a system may follow where a scenario leaves them open.

All rules for one thing are the same in mathematics, and round otherwise. What a rule is called here
is what a target declares.
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
"""Of gradients: that of each param's own gradient, or one for all."""
DivideEach = Literal["step", "round"]
"""Whether the sum of all rounds is divided, or each round's sum."""
Sync = Literal["last", "every", "every-in-block"]
"""The accumulation rule. `every-in-block`: each micro-batch is summed within each block of ranks,
and what comes of all of them over the blocks, once."""
Unused = Literal["zeros", "left-alone"]
"""What becomes of a param that no rank used in a step: it is stepped with a gradient of zeros, or
keeps its value and its state, and counts in no norm."""
NonFiniteRule = Literal["stepped", "skipped", "raises"]
"""What becomes of a step with a NaN or an infinity among its gradients, where losses are not
scaled. If it raises, nothing is updated, as in a step that is skipped."""
Masters = Literal["fp32", "param"]
"""Dtype of what the optimizer steps: an fp32 master of each param, or the working param itself."""
ClipFunction = Callable[[Tensor, float], Tensor | float]
"""From a 0-D fp32 norm and its bound, what gradients are multiplied by."""

_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """By which rules the reference computes; None where it does as the scenario says."""

    scale_loss: ScaleLoss | ScaleLossFunction | None = None
    """Factor of each loss before its backward; None for 1."""
    scale_second: ScaleLoss | ScaleLossFunction | None = None
    """That of a second loss, in the place of `scale_loss`; None for the same."""
    divide: DivideRule | None = None
    divide_by: float | None = None
    """A number in place of what the scenario counts."""
    predivide_by: float | None = None
    """What ranks divide by before the sum, which is then divided by the rest."""
    divide_each: DivideEach = "step"
    sync: Sync | None = None
    accumulate_dtype: GradDtype | None = None
    """In which a rank adds its micro-batches, or where it sums each of them, these sums."""
    reduce_dtype: GradDtype | None = None
    """In which ranks are summed."""
    copies_dtype: GradDtype | None = None
    """In which the sums of blocks of ranks are summed over these."""
    unused: Unused = "zeros"
    nonfinite: NonFiniteRule = "stepped"
    norm: Norm = "of-elements"
    clip: ClipForm | ClipFunction = "fp32-division"
    masters: Masters = "fp32"
    own: OwnRule | None = None
    """The target's update rule, for optimizer `own`."""

    @property
    def known_clip(self) -> ClipForm | None:
        """The form of clipping; None for a function of the target's own."""
        return None if callable(self.clip) else self.clip

    @property
    def takes_root(self) -> bool:
        """Whether the form of clipping reads the root of the sum of squares."""
        return self.known_clip is not None and takes_root(self.known_clip)


def dtype_named(name: GradDtype | None) -> torch.dtype | None:
    """Return the dtype that a name stands for; None for each param's own.

    Args:
        name: `param` and None alike are the param's own.
    """
    return _DTYPES.get(name or "param")


def clip_by_rule_(flat: Tensor, *, measured: Measure, norm_max: float, rules: Rules) -> None:
    """Clip a gradient in place by its norm.

    Args:
        flat: 1-D fp32.
        measured: Of the whole gradient.
        norm_max: Bound of the norm.
        rules: By which rule; a function of the target's own among them.
    """
    if callable(rules.clip):
        factor = torch.as_tensor(rules.clip(measured.norm.clone(), norm_max))
        flat.mul_(factor.to(device=flat.device, dtype=torch.float32))
        return
    clip_by_norm_(
        flat,
        norm=measured.norm,
        norm_max=norm_max,
        form=rules.clip,
        root=measured.squares**0.5,
    )
