"""Moves results of operations at random, as rounding might.

[Note: rounding noise]
Monte Carlo arithmetic (Parker 1997; CESTAC and Verrou are tools of the kind) measures how far
rounding alone moves a result: each operation's result is moved at random by up to one unit in its
last place. Results that are exact have no rounding and stay. An exact result of inputs with few
digits has zeros in its last places, and a rounded one has them by chance in one case of 2^12; so
numbers with as many zeros at their end stay. Counts and powers of two are among them. Narrower
formats have fewer digits, so there fewer zeros have to do, and chance keeps more numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_sim.against.native_dtypes import stored


class _Format(NamedTuple):
    bits: torch.dtype
    """The integer dtype of its bits."""
    exact_bits: int
    """Zeros at the end with which a number counts as exact."""
    computed_in: torch.dtype
    """The dtype in which a number is moved."""


_FORMATS = {
    torch.float64: _Format(torch.int64, 12, torch.float64),
    torch.float32: _Format(torch.int32, 8, torch.float64),
    torch.float16: _Format(torch.int16, 4, torch.float32),
    torch.bfloat16: _Format(torch.int16, 3, torch.float32),
}


class Noise:
    """Random movements of one rank's results.

    Args:
        seed: Seed of the movements.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def move(self, result: Any) -> None:
        """Move the numbers of a result by up to one unit in the last place of their format.

        Args:
            result: A tensor, or a list of tensors and other values.
        """
        for each in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(each, Tensor) and each.numel() and each.layout is torch.strided:
                known = _FORMATS.get(stored(each))
                if known is not None:
                    self._move(each, known)

    def _move(self, tensor: Tensor, known: _Format) -> None:
        noise = torch.rand(tensor.shape, generator=self._generator, dtype=known.computed_in)
        epsilon = torch.finfo(stored(tensor)).eps
        noise.mul_(2 * epsilon).add_(1 - epsilon)
        digits = tensor.contiguous().view(known.bits)
        noise.masked_fill_((digits & ((1 << known.exact_bits) - 1)) == 0, 1.0)
        if stored(tensor) is known.computed_in:
            tensor.mul_(noise)
        else:
            tensor.copy_(noise.mul_(tensor))
