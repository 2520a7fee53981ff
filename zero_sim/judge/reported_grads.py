"""Gradients in a target's declared form: point of the step, and dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import get_args

import torch
from torch import Tensor

from zero_sim.findings.compare import same_bits
from zero_sim.findings.ratio import find_ratio
from zero_sim.reference import Division, ReferenceStep, StepAgain
from zero_sim.reference.bounding import Interval
from zero_sim.targets import Numerics
from zero_sim.targets.numerics import ReportedDtype, ReportedGrads

_IN: Mapping[ReportedDtype, str] = {
    "sum": "the dtype of the sum",
    "param": "the dtype of the param",
    "fp32": "fp32",
}


def as_reported(
    expected: ReferenceStep, name: str, *, point: ReportedGrads, dtype: ReportedDtype
) -> Tensor | None:
    """Return a reduced gradient at a point of the step; None if the step does not get there.

    Args:
        expected: The reference's step.
        name: Param name.
        point: Point of the step.
        dtype: Dtype of the report.
    """
    # The dtype "param" means the working param's.
    like = expected.params[name].dtype
    if point == "after-unscale":
        # A skipped step does not unscale or clip.
        if expected.skipped:
            return None
        wide = expected.update.apply(expected.grads[name])
        return wide.to(like) if dtype == "param" else wide
    if point != "after-clip":
        return _in_dtype(expected.grads[name], expected.update.division, point, dtype, like)
    if name in expected.stepped:
        stepped = expected.stepped[name]
        return stepped.to(like) if dtype == "param" else stepped
    # Params without a gradient in this step report zeros.
    return None if expected.skipped else torch.zeros_like(expected.masters[name])


def sum_as_reported(by: StepAgain, name: str, *, numerics: Numerics) -> Tensor:
    """Return a reduced gradient computed by other rules, in the target's form.

    Args:
        by: The step by these rules.
        name: Param name.
        numerics: Declared by the target.
    """
    taken = by.again.taken
    if numerics.reported_at == "after-unscale":
        taken = replace(
            taken, grads={name: by.sum(name)}, update=replace(taken.update, division=by.division)
        )
        reported = as_reported(taken, name, point="after-unscale", dtype=numerics.reported_dtype)
        if reported is not None:
            return reported
    like = taken.params[name].dtype
    return _in_dtype(by.sum(name), by.division, numerics.reported_at, numerics.reported_dtype, like)


def hint_of_other_point(
    expected: ReferenceStep,
    name: str,
    cut: Callable[[Tensor], Tensor],
    got: Tensor,
    *,
    numerics: Numerics,
) -> str:
    """Propose a declaration of another point or dtype that fits a wrong gradient.

    Args:
        expected: The reference's step.
        name: Param name.
        cut: Cuts a whole gradient to the reported part.
        got: The reported gradient.
        numerics: Declared by the target.

    Returns:
        Empty if none fits.
    """
    # Propose the first declaration with equal bits.
    for point in get_args(ReportedGrads):
        for dtype in get_args(ReportedDtype):
            other = as_reported(expected, name, point=point, dtype=dtype)
            is_declared = (point, dtype) == (numerics.reported_at, numerics.reported_dtype)
            if other is None or is_declared or not _is(cut(other), got):
                continue
            fields = [f"reported_grads='{point}'"] if point != numerics.reported_at else []
            fields += [f"reported_dtype='{dtype}'"] if dtype != numerics.reported_dtype else []
            what = f"its bits {_where(point, expected.divisor)}"
            what += f", in {_IN[dtype]}" if dtype != numerics.reported_dtype else ""
            return _declare(what, ", ".join(fields))
    # No exact match. Perhaps it is reported after a division that rounds in another way.
    reported = as_reported(expected, name, point="before-division", dtype=numerics.reported_dtype)
    if reported is None or numerics.reported_at != "before-division" or expected.divisor == 1:
        return ""
    reported = cut(reported)
    alike = reported.numel() == got.numel() and reported.dtype == got.dtype
    ratio = find_ratio(reported, got) if alike else None
    if ratio and ratio.is_rounded and not ratio.is_multiple and ratio.number == expected.divisor:
        # Not the same bits, because the target also divides by another rule.
        what = f"its values {_where('after-division', expected.divisor)}, up to rounding"
        return _declare(what, "reported_grads='after-division'")
    return ""


def hint_within_bounds(bound: Interval, got: Tensor, *, divisor: float, divided: bool) -> str:
    """Propose a declaration if a gradient fits the bounds on the other side of the division.

    Args:
        bound: Bound of the sum, before its division. # 1D
        got: Gradient outside its bounds. # 1D
        divisor: Divisor of the sum.
        divided: True if the target declares that it reports after the division.

    Returns:
        Empty if it does not fit.
    """
    if divisor == 1:
        return ""
    point: ReportedGrads = "before-division" if divided else "after-division"
    if not divided:
        bound = bound.divided_by(divisor)
        # Rounding is monotonic, so rounded ends bound rounded quotients.
        low, high = (end.to(got.dtype).double() for end in (bound.low, bound.high))
        bound = replace(bound, low=low, high=high)
    if not bool(bound.holds(got).all()):
        return ""
    return _declare(f"within its bounds {_where(point, divisor)}", f"reported_grads='{point}'")


def _where(point: ReportedGrads, divisor: float) -> str:
    return point.replace("-", " the ") + (f" by {divisor:g}" if "division" in point else "")


def _declare(what: str, fields: str) -> str:
    return f"these are {what}.\nIf this is intended, declare Numerics({fields})"


def _in_dtype(
    grad: Tensor, division: Division, point: ReportedGrads, dtype: ReportedDtype, like: torch.dtype
) -> Tensor:
    """Convert a sum to the point and dtype of the report."""
    if dtype == "fp32" and not division.is_rounded:
        # Widen before the division, unless the target rounds the quotient first.
        grad = grad.to(torch.float32)
    if point != "before-division" and not division.each_round:
        # With `each_round`, every round's sum is divided already.
        grad = division.after(grad)
    if dtype == "sum":
        return grad
    return grad.to(torch.float32 if dtype == "fp32" else like)


def _is(other: Tensor, got: Tensor) -> bool:
    alike = other.numel() == got.numel() and other.dtype == got.dtype
    return alike and same_bits(other.reshape(-1), got.reshape(-1))
