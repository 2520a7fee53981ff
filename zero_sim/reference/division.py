"""Division of the sum of the ranks' gradients: when, and by what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, assert_never

import torch
from torch import Tensor

Divide = Literal["none", "pre", "post", "premul"]
AVERAGES: Mapping[str, Divide | None] = {"nccl-ring": "premul", "nccl-sym": None}
"""What AVG of a collective is, by the order in which it adds; in all other ones `post`. NCCL's
rings multiply what each rank brings with the reciprocal, its symmetric kernels what they
accumulated, which none of these is."""
DivideBy = Literal["ranks", "micro-batches", "tokens"]


def quotient(values: Tensor, number: float) -> Tensor:
    """Return what a tensor is when divided by a number, rounded to its dtype once.

    By a number, or a tensor of the CPU, CUDA does not divide: it multiplies with the rounded
    reciprocal, which differs in the last bit. So the number becomes a tensor beside the others.
    bf16 has no 257 and fp16 no 2049, so the quotient is taken in fp32. That has twice their bits
    and two, so the second rounding meets no tie that the first one made.
    """
    wide = values if values.dtype is torch.float64 else values.to(torch.float32)
    divisor = torch.full((), number, dtype=wide.dtype, device=wide.device)
    return wide.div(divisor).to(values.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """One step's division."""

    how: Divide
    count: int
    """What it is divided by, 1 or more."""

    @property
    def is_before(self) -> bool:
        """Whether ranks divide before the sum."""
        return self.how in ("pre", "premul")

    def before(self, grad: Tensor) -> Tensor:
        """Return what a rank contributes to the sum, in the dtype of `grad`, rounded to it once."""
        match self.how:
            case "none" | "post":
                return grad
            case "pre":
                return quotient(grad, self.count)
            case "premul":
                return grad * self.reciprocal(grad.dtype).to(grad.device)
            case unknown:
                assert_never(unknown)

    def reciprocal(self, dtype: torch.dtype) -> Tensor:
        """Return 0-D 1 / count, on the CPU, computed in fp32 and then rounded to `dtype`."""
        return torch.ones((), dtype=torch.float32).div_(self.count).to(dtype)

    def after_(self, wide: Tensor) -> None:
        """Divide an fp32 sum in place, where that is what `post` asks for.

        The quotient is a true one: a product with a rounded 1 / count differs in the last bit.
        """
        if self.how == "post" and self.count != 1:
            wide.copy_(quotient(wide, self.count))


def count_contributions(by: DivideBy, *, rank_count: int, micro_batches: int, rows: int) -> int:
    """Return what one step's sum is divided by.

    Args:
        by: What is counted.
        rank_count: Ranks, of all replicas.
        micro_batches: Micro-batches of each of them.
        rows: Rows that all of them saw in all their micro-batches.
    """
    match by:
        case "ranks":
            return rank_count
        case "micro-batches":
            return rank_count * micro_batches
        case "tokens":
            return rows
        case unknown:
            assert_never(unknown)
