"""The manner in which two tensors differ: what tells two causes of one kind of difference apart."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from zero_sim.findings.compare import places_of, unequal

Manner = Literal[
    "shape", "missing", "nonfinite", "finite", "zeros", "nonzeros", "sign", "one-ulp",
    "smaller", "larger", "moved", "values",
]  # fmt: skip
"""`shape`: of another dtype or number of elements; `missing`: one side has nothing. Of elements
that differ, the first that is true: `nonfinite` where one is NaN or infinite and should not be,
`finite` the other way round; all of them `zeros`, or `nonzeros` where zeros belong; all `sign`: the
other sign; all `one-ulp` away; all `smaller` or `larger` by one factor; all `moved`: what belongs
elsewhere in the tensor; else `values`."""

_FACTOR_MAX = 4096
"""Of one element alone anything is a factor: a whole number up to this, or one divided by it."""


def manner_of(expected: Tensor, got: Tensor) -> Manner:
    """The manner in which two tensors differ, which do.

    Args:
        expected: Of any shape and dtype.
        got: What came in its place.
    """
    if expected.dtype != got.dtype or expected.numel() != got.numel():
        return "shape"
    expected, got = expected.detach().reshape(-1), got.detach().reshape(-1)
    differs = unequal(expected, got)
    if not expected.is_floating_point():
        return _of_values(expected[differs].double(), got[differs].double(), expected, eps=0.0)
    wanted, came = expected[differs].double(), got[differs].double()
    if not bool(wanted.isfinite().all()):
        return "finite" if bool(came.isfinite().all()) else "nonfinite"
    if not bool(came.isfinite().all()):
        return "nonfinite"
    apart = (places_of(expected[differs]) - places_of(got[differs])).abs()
    is_near = bool((apart <= 1).all())
    return _of_values(
        wanted, came, expected.double(), eps=torch.finfo(expected.dtype).eps, is_near=is_near
    )


def _of_values(
    wanted: Tensor, came: Tensor, expected: Tensor, *, eps: float, is_near: bool = False
) -> Manner:
    """The manner of finite elements that differ, in fp64; `eps` of the dtype that they had."""
    if not bool(came.any()):
        return "zeros"
    if not bool(wanted.any()):
        return "nonzeros"
    if torch.equal(wanted, -came):
        return "sign"
    if is_near:
        return "one-ulp"
    factor = _factor(wanted, came, eps=eps)
    if factor is not None:
        return "smaller" if abs(factor) < 1 else "larger"
    if wanted.numel() > 1 and bool(torch.isin(came, expected[expected != 0]).all()):
        return "moved"
    return "values"


def _factor(wanted: Tensor, came: Tensor, *, eps: float) -> float | None:
    """By what all elements are multiplied, rounded twice at most; None where by several factors."""
    if not bool(wanted.all()):
        return None
    # The largest is the one whose rounding says least.
    largest = int(wanted.abs().argmax())
    factor = float(came[largest] / wanted[largest])
    inverse = 1 / factor if factor else 0.0
    nearest = float(round(inverse)) if abs(factor) < 1 else float(round(factor))
    exact = (1 / nearest if nearest else 0.0) if abs(factor) < 1 else nearest
    is_whole = 1 < abs(nearest) <= _FACTOR_MAX and abs(factor - exact) <= 2 * eps * abs(factor)
    if not is_whole and wanted.unique().numel() < 2:
        return None
    factor = exact if is_whole else factor
    off = (came - factor * wanted).abs()
    return factor if bool((off <= 2 * eps * (factor * wanted).abs()).all()) else None
