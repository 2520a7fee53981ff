"""Whole-gradient measures before the optimizer: norm, zeros and overflow.

[Note: certified norms]
A sharded system adds squares in another order than this module, so the last bits of the sum may
differ. In fp64 this rarely matters: squares of fp32 values are exact, and the norm keeps only 24 of
the sum's 53 bits. It matters if the norm lies next to the midpoint between two fp32 values. In any
order, a sum of n terms >= 0 is off by less than n roundings, relative to the sum. So two orders
differ by less than 2n roundings. If all sums within this reach round to the same fp32 norm, every
order gives this norm, and it is certified.
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
    """Measures of a step's whole gradient before clipping."""

    squares: float
    """Sum of squares, in fp64."""
    terms: int
    """Number of squares."""
    norm: Tensor  # 0D, fp32
    """Root of the sum of squares, both in fp64, rounded to fp32; fp64 if the system reports
    fp64."""
    norm_certified: bool
    """True if every fp64 summation order gives this norm; see [Note: certified norms]."""
    zeros: int
    """Number of zero elements."""
    finite: bool
    """True if no element is infinite or NaN."""


def measure(flat: Tensor) -> Measure:
    """Measure a 1-D fp32 gradient; without elements its norm is 0."""
    # In chunks, because an fp64 copy of the whole gradient takes twice its memory.
    squares = 0.0
    for chunk in flat.split(_CHUNK_ELEMS):
        # Squares of fp32 values are exact in fp64.
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
    """Combine measures of a gradient's parts."""
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
    """Return the norm for a sum of `terms` squares, and True if it is certified.

    The norm is 0-D fp32 on the CPU. Squares are added in fp64, in any order.
    """
    # The sum itself, then both ends of its reach.
    ends = [squares, *squares_within_reach(squares, terms=terms)]
    norms = torch.tensor(ends, dtype=torch.float64).sqrt_().to(torch.float32)
    # The root is monotonic, so equal norms at both ends cover all sums between them.
    _, low, high = norms.tolist()
    # Infinity and NaN are the result of every order.
    return norms[0], low == high or not math.isfinite(squares)


def squares_within_reach(squares: float, *, terms: int) -> tuple[float, float]:
    """Return the least and greatest sum of `terms` squares in any other fp64 summation order."""
    # Two orders differ by up to 2n roundings; see [Note: certified norms].
    margin = 2 * (terms + _SLACK_ROUNDINGS) * _ROUNDING
    return squares * (1 - margin), squares * (1 + margin)


def root_of_bounds(squares_min: float, squares_max: float, *, terms: int) -> tuple[Tensor, Tensor]:
    """Return the least and greatest norm, 0-D fp32 on the CPU, for bounds on the squares' sum."""
    margin = 2 * (terms + _SLACK_ROUNDINGS) * _ROUNDING
    ends = [squares_min * (1 - margin), squares_max * (1 + margin)]
    # Roots round monotonically, so these ends bound every order.
    low, high = torch.tensor(ends, dtype=torch.float64).sqrt_().to(torch.float32).unbind()
    return low, high


def flatten_wide(grads: Mapping[str, Tensor], *, names: Sequence[str]) -> Tensor:
    """Concatenate gradients of any dtypes into a new 1-D fp32 tensor, in the order of `names`."""
    if not names:
        # On the gradients' device, even if none is trained.
        return torch.empty(0, device=next((grad.device for grad in grads.values()), None))
    return torch.cat([grads[name].reshape(-1) for name in names]).to(torch.float32)


def unflatten(flat: Tensor, *, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return consecutive views of a 1-D tensor, with the names and shapes of `like`."""
    pieces = flat.split_with_sizes([tensor.numel() for tensor in like.values()])
    return {
        name: piece.view_as(tensor)
        for (name, tensor), piece in zip(like.items(), pieces, strict=True)
    }
