"""Rounding noise: random changes to results, as large as rounding.

[Note: rounding noise]
Monte Carlo arithmetic (Parker 1997; CESTAC and Verrou are such tools) measures how much rounding
changes a result. Here each operation's result changes at random, by up to one unit in the last
place. Exact results stay, because they are not rounded. An exact result of short inputs ends in
zero bits. A rounded float64 ends in 12 zero bits only once in 2^12 cases, by chance. So values that
end in 12 zero bits are kept, such as counts and powers of two. Narrower formats have fewer digits,
so fewer zero bits must suffice, and chance keeps more values.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_sim.against.native_dtypes import stored
from zero_sim.against.points import tensors_in
from zero_sim.sim.dispatch import has_own_dispatch

# Elements per part: 256 KiB of float64 fit into a processor's cache.
_PART_ELEMS = 1 << 15
# Factors drawn per format. Each part of a tensor uses a stretch of them.
_TABLE_ELEMS = 1 << 20


class _Format(NamedTuple):
    bits: torch.dtype
    """Integer dtype for reading its bits."""
    exact_bits: int
    """Trailing zero bits that mark a value as exact."""
    computed_in: torch.dtype
    """Dtype in which values are multiplied by factors."""


_FORMATS = {
    torch.float64: _Format(torch.int64, 12, torch.float64),
    torch.float32: _Format(torch.int32, 8, torch.float64),
    torch.float16: _Format(torch.int16, 4, torch.float32),
    torch.bfloat16: _Format(torch.int16, 3, torch.float32),
}


class Noise:
    """Random changes to one rank's results, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._places = random.Random(seed)
        # By format. Each part of a tensor starts at a random position in the table, because drawing
        # every factor would take as long as the script's own operations.
        self._tables: dict[torch.dtype, Tensor] = {}

    def move(self, result: Any) -> None:
        """Change a tensor or list of tensors in place, by up to one unit in the last place."""
        for each in tensors_in((result,)):
            if (
                not has_own_dispatch(type(each))
                and each.numel()
                and each.layout is torch.strided
                and not each.is_meta
                and stored(each) in _FORMATS
            ):
                self._move(each)

    def _move(self, tensor: Tensor) -> None:
        if tensor.is_contiguous():
            # Part by part, so that each stays in the cache while it is read and written.
            for part in tensor.view(-1).split(_PART_ELEMS):
                _move_part(part, self._factors(stored(tensor), part.numel()))
            return
        # Strided memory has no flat parts, so collect factors for a single operation.
        whole, rest = divmod(tensor.numel(), _PART_ELEMS)
        sizes = [_PART_ELEMS] * whole + [rest] * bool(rest)
        factors = torch.cat([self._factors(stored(tensor), size) for size in sizes])
        _move_part(tensor, factors.view(tensor.shape))

    def _factors(self, dtype: torch.dtype, numel: int) -> Tensor:
        table = self._tables.get(dtype)
        if table is None:
            epsilon = torch.finfo(dtype).eps
            computed_in = _FORMATS[dtype].computed_in
            table = torch.rand(_TABLE_ELEMS, generator=self._generator, dtype=computed_in)
            # Uniform in [1 - epsilon, 1 + epsilon].
            self._tables[dtype] = table.mul_(2 * epsilon).add_(1 - epsilon)
        start = self._places.randrange(_TABLE_ELEMS - numel + 1)
        return table[start : start + numel]


def _move_part(values: Tensor, factors: Tensor) -> None:
    known = _FORMATS[stored(values)]
    digits = values.contiguous().view(known.bits)
    # True if the last bits are not all zero; see [Note: rounding noise].
    is_rounded = (digits & ((1 << known.exact_bits) - 1)).bool()
    moved = values * factors
    # Written in place. The other branch converts back from the wider dtype of the factors.
    if stored(moved) is stored(values):
        torch.where(is_rounded, moved, values, out=values)
    else:
        values.copy_(torch.where(is_rounded, moved, values))
