"""Rules for clipping by norm that differ only in rounding.

[Note: forms of the clip coefficient]
There are several ways to compute min(1, bound / (norm + 1e-6)), and their results are 1 to 4 ulp
apart. A form's name combines precision and operation:

- `fp32-...`: from the fp32 norm, in fp32 tensors;
- `fp64-...`: from the fp32 norm, in Python floats, rounded to fp32 before it meets a gradient;
- `fp64-root-...`: from the fp64 root of the squares, never rounded to fp32.

- `...-division`: bound / (norm + 1e-6), a true division;
- `...-reciprocal`: bound x (1 / (norm + 1e-6)), as torch divides a number by a tensor;
- `...-inverse`: 1 / ((norm + 1e-6) / bound);
- `...-quotient`: gradients are divided by max(1, (norm + 1e-6) / bound), not multiplied.

With the suffix `-without-eps`, nothing is added to the norm.

Upstream uses:

- `fp32-division`: fairscale, and this project's own system;
- `fp32-reciprocal`: torch.nn.utils.clip_grad_norm_ and FSDP;
- `fp64-division`, `fp64-root-division`: Megatron-LM, `max_norm / (total_norm + 1.0e-6)` if below 1;
- `fp32-inverse`, `fp64-inverse`, `fp64-root-inverse`: DeepSpeed and ColossalAI
  (`1. / combined_scale`). They also multiply by the loss scale, a power of two, so nothing rounds;
- `fp32-quotient-without-eps`: apex's LAMB kernels.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from zero_sim.reference.gradient import Measure, squares_within_reach

ClipForm = Literal[
    "fp32-division",
    "fp32-reciprocal",
    "fp32-inverse",
    "fp32-quotient",
    "fp64-division",
    "fp64-inverse",
    "fp64-root-division",
    "fp64-root-inverse",
    "fp32-division-without-eps",
    "fp32-reciprocal-without-eps",
    "fp32-inverse-without-eps",
    "fp32-quotient-without-eps",
    "fp64-division-without-eps",
    "fp64-inverse-without-eps",
    "fp64-root-division-without-eps",
    "fp64-root-inverse-without-eps",
]
"""Clip form; see [Note: forms of the clip coefficient]."""

CLIP_FORMS: tuple[ClipForm, ...] = get_args(ClipForm)

_EPS = 1e-6
_WITHOUT_EPS = "-without-eps"


def takes_root(form: ClipForm) -> bool:
    """Return True if a form needs the unrounded root."""
    return form.startswith("fp64-root-")


def clip_by_norm_(
    flat: Tensor,
    *,
    norm: Tensor,
    norm_max: float,
    form: ClipForm = "fp32-division",
    root: float | None = None,
) -> None:
    """Clip a gradient in place by its norm.

    Args:
        flat: 1-D fp32.
        norm: Whole-gradient norm, 0-D fp32.
        norm_max: Norm bound.
        form: Clip form.
        root: The same norm in fp64, read only by forms that take the root.
    """
    factor = clip_factor(norm, norm_max=norm_max, form=form, root=root)
    # A division, because a product with the reciprocal rounds differently.
    if "quotient" in form:
        flat.div_(factor)
    else:
        flat.mul_(factor)


def clip_factor(
    norm: Tensor, *, norm_max: float, form: ClipForm, root: float | None = None
) -> Tensor:
    """Return the 0-D fp32 gradient factor, or the divisor for a quotient form.

    Arguments are as for `clip_by_norm_`.
    """
    in_fp32 = form.startswith("fp32")
    if takes_root(form):
        assert root is not None, "expected `root` for a form that takes the root"
        norm = torch.tensor(root, dtype=torch.float64, device=norm.device)
    norm = norm.to(torch.float32 if in_fp32 else torch.float64)
    # All tensors, because torch divides a number by a tensor by multiplying with the reciprocal.
    numbers = torch.tensor([norm_max, _EPS, 1.0], dtype=norm.dtype, device=norm.device)
    bound, eps, one = numbers.unbind()
    # In the norm's dtype, because this sum rounds.
    if not form.endswith(_WITHOUT_EPS):
        norm = norm + eps
    match form.removesuffix(_WITHOUT_EPS).rpartition("-")[2]:
        case "division":
            factor = torch.minimum(one, bound / norm)
        case "reciprocal":
            factor = torch.minimum(one, bound * (one / norm))
        case "inverse":
            factor = torch.minimum(one, one / (norm / bound))
        case "quotient":
            factor = torch.maximum(one, norm / bound)
        case unknown:
            raise AssertionError(f"no clip form ends with {unknown!r}")
    # fp64 forms round here, like a Python float that multiplies an fp32 gradient.
    return factor.to(torch.float32)


def clip_is_certified(measured: Measure, *, norm_max: float, form: ClipForm) -> bool:
    """Return True if every fp64 summation order of the squares gives the same factor."""
    if not takes_root(form):
        return measured.norm_certified
    # The factor is monotonic in the root, so equal factors at both ends cover all between.
    low, high = (
        clip_factor(measured.norm, norm_max=norm_max, form=form, root=squares**0.5)
        for squares in squares_within_reach(measured.squares, terms=measured.terms)
    )
    return bool(low == high) or not measured.finite
