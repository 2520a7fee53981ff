"""The norm of a gradient whose pieces are on many ranks, and clipping.

Ranks exchange sums of squares in fp64, and take the root of the total.

- A norm of norms would round each root and square it again. In fp32, this is wrong for about half
  of all small integers.
- The last bits of an fp32 sum would depend on shard boundaries, so the clipped gradient would
  depend on the number of ranks. In fp64 the square of an fp32 value is exact, and the sum has 29
  spare bits before it is rounded to fp32. Boundaries only matter if the root is close to the middle
  between two fp32 numbers; the reference detects these cases.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

_CHUNK_ELEMS = 1 << 20
"""Maximum number of elements in memory as fp64 at a time."""


def measure_grads(grads: Iterable[Tensor], *, device: torch.device) -> Tensor:
    """Measure a rank's gradients. Sum the results over owners to measure the whole gradient.

    Args:
        grads: fp32, any shapes; every element once, without padding.
        device: Device of the result if there are no gradients.

    Returns:
        1D fp64 `[sum of squares, number of zeros, overflows]`. `overflows` is 1 if any element is
        infinite or NaN, else 0.
    """
    # Overflows have an entry of their own, because comparisons with a NaN sum are always False.
    # fp64 counts exactly up to 2**53. Python floats are fp64, and cheaper to add than 0D tensors.
    squares, zeros = 0.0, 0
    for flat in _chunks(grads):
        # 1D fp64, at most _CHUNK_ELEMS elements.
        wide = flat.to(torch.float64)
        squares += wide.dot(wide).item()
        zeros += flat.numel() - int(torch.count_nonzero(flat))
    # Squares of finite fp32 values sum to at most 2**256 n, inside the range of fp64, so a
    # non-finite sum means a non-finite gradient.
    overflows = not math.isfinite(squares)
    return torch.tensor([squares, zeros, overflows], dtype=torch.float64, device=device)


def _chunks(grads: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield all elements in 1D pieces: small gradients joined, large gradients split."""
    # Pieces of at most _CHUNK_ELEMS limit the memory for the fp64 copy.
    gathered: list[Tensor] = []
    gathered_elems = 0
    for grad in grads:
        for piece in grad.reshape(-1).split(_CHUNK_ELEMS):
            if gathered and gathered_elems + piece.numel() > _CHUNK_ELEMS:
                yield torch.cat(gathered)
                gathered, gathered_elems = [], 0
            gathered.append(piece)
            gathered_elems += piece.numel()
    if gathered:
        yield gathered[0] if len(gathered) == 1 else torch.cat(gathered)


def root_of_squares(squares: Tensor) -> Tensor:
    """Return the norm as 0D fp32 from a 0D fp64 sum of squares."""
    return squares.sqrt().to(torch.float32)


def clip_by_norm_(grads: Iterable[Tensor], *, norm: Tensor, max_norm: float) -> None:
    """Scale gradients in place by `min(1, max_norm / (norm + 1e-6))`.

    Args:
        grads: fp32, any shapes.
        norm: 0D fp32, the norm of the whole gradient. If it is NaN, all gradients become NaN.
        max_norm: Upper bound for the norm.
    """
    # Tensors, because torch divides a Python number by a tensor as a product with the rounded
    # reciprocal, which gives different bits.
    bound, tiny, one = (torch.full_like(norm, value) for value in (max_norm, 1e-6, 1.0))
    coefficient = torch.minimum(one, bound / (norm + tiny))
    for grad in grads:
        grad.mul_(coefficient)


def clip_by_value_(grads: Iterable[Tensor], *, max_value: float) -> None:
    """Clamp every element in place to `[-max_value, max_value]`; a NaN stays."""
    for grad in grads:
        grad.clamp_(-max_value, max_value)
