"""The whole gradient as the optimizer gets it: its norm, its zeros, its overflow.

[Note: certified norms]
An order of addition decides the last bits of a sum of squares, and who holds the gradient in
shards adds in another order than this module does. In fp64 that rarely matters: squares of fp32
values are exact there, and of the sum's 53 bits only 24 are left in the norm. It matters where the
norm lies next to the middle between two fp32 values. Adding n terms that are not negative is off by
less than n roundings, relative to the sum, whatever the order; so two orders are less than 2n
apart. Where all sums within that reach give one fp32 norm, every order does, and the norm is called
certified.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ROUNDING = 2.0**-53
_SLACK_ROUNDINGS = 4  # the root, the bounds themselves, and the sum over ranks
_CHUNK_ELEMS = 1 << 20  # elements that are in memory as fp64 at one time


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """What a step's whole gradient looks like before it is clipped."""

    squares: float
    """Sum of squares, in fp64."""
    terms: int
    """How many squares were added."""
    norm: Tensor  # 0D, fp32
    """Root of the sum of squares, both in fp64, rounded to fp32; fp64 if a system reports it so."""
    norm_certified: bool
    """Whether every order of adding in fp64 gives this norm; see [Note: certified norms]."""
    zeros: int
    """Elements that are zero."""
    finite: bool
    """Whether no element is infinite or NaN."""


def measure(flat: Tensor) -> Measure:
    """Measure a 1-D fp32 gradient; without elements its norm is 0."""
    squares = 0.0
    for chunk in flat.split(_CHUNK_ELEMS):
        wide = chunk.to(torch.float64)
        squares += torch.dot(wide, wide).item()
    norm, certified = root_of_squares(squares, terms=flat.numel())
    return Measure(
        squares=squares,
        terms=flat.numel(),
        norm=norm.to(flat.device),
        norm_certified=certified,
        zeros=flat.numel() - int(flat.count_nonzero()),
        # No sum of squares of finite fp32 values leaves the range of fp64.
        finite=math.isfinite(squares),
    )


def measure_together(parts: Sequence[Measure]) -> Measure:
    """Return the measure of a gradient of which each part was measured by itself."""
    if len(parts) == 1:
        return parts[0]
    squares, terms = sum(part.squares for part in parts), sum(part.terms for part in parts)
    norm, certified = root_of_squares(squares, terms=terms)
    return Measure(
        squares=squares,
        terms=terms,
        norm=norm.to(parts[0].norm.device),
        norm_certified=certified,
        zeros=sum(part.zeros for part in parts),
        finite=all(part.finite for part in parts),
    )


def root_of_squares(squares: float, *, terms: int) -> tuple[Tensor, bool]:
    """Return the 0-D fp32 norm of a sum of squares, on the CPU, and whether it is certified.

    Args:
        squares: The sum, added in fp64 in any order.
        terms: How many squares were added.
    """
    ends = [squares, *squares_within_reach(squares, terms=terms)]
    norms = torch.tensor(ends, dtype=torch.float64).sqrt_().to(torch.float32)
    _, low, high = norms.tolist()
    # An infinity or a NaN comes out of every order.
    return norms[0], low == high or not math.isfinite(squares)


def squares_within_reach(squares: float, *, terms: int) -> tuple[float, float]:
    """Return the least and the largest sum of squares that another order of adding can give.

    Args:
        squares: The sum, added in fp64 in any order.
        terms: How many squares were added.
    """
    margin = 2 * (terms + _SLACK_ROUNDINGS) * _ROUNDING
    return squares * (1 - margin), squares * (1 + margin)


def root_of_bounds(squares_min: float, squares_max: float, *, terms: int) -> tuple[Tensor, Tensor]:
    """Return between which 0-D fp32 norms, on the CPU, that of a gradient must lie.

    Args:
        squares_min: Least sum of squares, added in fp64 in any order.
        squares_max: Largest one.
        terms: How many squares are added.
    """
    margin = 2 * (terms + _SLACK_ROUNDINGS) * _ROUNDING
    ends = [squares_min * (1 - margin), squares_max * (1 + margin)]
    low, high = torch.tensor(ends, dtype=torch.float64).sqrt_().to(torch.float32).unbind()
    return low, high


def flatten_wide(grads: Mapping[str, Tensor], *, names: Sequence[str]) -> Tensor:
    """Copy some gradients, of any dtypes, into one new 1-D fp32 tensor, in order."""
    if not names:
        return torch.empty(0, device=next((grad.device for grad in grads.values()), None))
    return torch.cat([grads[name].reshape(-1) for name in names]).to(torch.float32)


def unflatten(flat: Tensor, *, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return views of a 1-D tensor, one after the other, in the shapes of `like`."""
    pieces = flat.split_with_sizes([tensor.numel() for tensor in like.values()])
    return {
        name: piece.view_as(tensor)
        for (name, tensor), piece in zip(like.items(), pieces, strict=True)
    }
