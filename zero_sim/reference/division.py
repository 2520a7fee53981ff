"""Division of the sum of the ranks' gradients: when, how, in which dtype, and by what.

[Note: rules of division]
What turns a sum of ranks into a mean is one number in mathematics. In floating point these differ:

- `pre`: each rank divides before the sum, in the gradient's dtype;
- `premul`: each rank multiplies by the reciprocal, rounded to the gradient's dtype first;
- `premul-fp32`: each rank multiplies by the fp32 reciprocal; the product is rounded;
- `post`: the sum is divided once it is fp32;
- `post-rounded`: the sum is divided in its own dtype;
- `postmul`, `postmul-rounded`: likewise, but multiplied by the fp32 reciprocal.

In fp32 `premul` and `premul-fp32` are the same, and what is rounded is what is not.

Who computes it so: `premul`, DDP's reducer; `premul-fp32`, Megatron's DDP and NCCL's PREMUL_SUM by
a number; `pre`, DDP's default comm hook and DeepSpeed's stages 1 to 3; `post-rounded`, AVG of gloo
and FSDP2 where it forces a sum; `postmul-rounded`, DeepSpeed's stage 0. FSDP1, FSDP2 in fp16 and
DeepSpeed with `prescale_gradients` divide by one factor before the sum and by the rest after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, assert_never, get_args

import torch
from torch import Tensor

Divide = Literal["none", "pre", "post", "premul"]
"""What a scenario can say."""
DivideRule = Literal[
    "none",
    "pre",
    "premul",
    "premul-fp32",
    "post",
    "post-rounded",
    "postmul",
    "postmul-rounded",
]
"""What a system can do; see [Note: rules of division]."""

DIVIDE_RULES: tuple[DivideRule, ...] = get_args(DivideRule)

AVERAGES: Mapping[str, Divide | None] = {"nccl-ring": "premul", "nccl-sym": None}
"""What AVG of a collective is, by the order in which it adds; in all other ones `post-rounded`.
NCCL's rings multiply what each rank brings with the reciprocal, its symmetric kernels what they
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


def product(values: Tensor, number: float) -> Tensor:
    """Return what a tensor is when multiplied by the fp32 reciprocal of a number, rounded once.

    As `quotient`, in fp32 and then rounded to the dtype of `values`.
    """
    wide = values.to(torch.float32)
    factor = torch.tensor(1.0 / number, dtype=torch.float32, device=wide.device)
    return wide.mul(factor).to(values.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """One step's division."""

    how: DivideRule
    count: float
    """What it is divided by in all."""
    first: float | None = None
    """What each rank divides by before the sum, where the rest comes after it; then `how` is one of
    the rules for after the sum."""
    each_round: bool = False
    """Whether each round's sum is divided, and what is divided is then added."""

    @property
    def is_before(self) -> bool:
        """Whether ranks divide before the sum."""
        return self.how in ("pre", "premul", "premul-fp32") or self.first is not None

    @property
    def is_rounded(self) -> bool:
        """Whether a sum is divided in its own dtype."""
        return self.how.endswith("-rounded") or self.each_round

    @property
    def rest(self) -> float:
        """What a sum is yet to be divided by: 1 where nothing comes after it."""
        if not self.how.startswith("post"):
            return 1
        return self.count if self.first is None else self.count / self.first

    def before(self, grad: Tensor) -> Tensor:
        """Return what a rank contributes to the sum, in the dtype of `grad`, rounded to it once."""
        if self.first is not None:
            return (product if "mul" in self.how else quotient)(grad, self.first)
        match self.how:
            case "pre":
                return quotient(grad, self.count)
            case "premul":
                return grad * self.reciprocal(grad.dtype).to(grad.device)
            case "premul-fp32":
                return product(grad, self.count)
            case "none" | "post" | "post-rounded" | "postmul" | "postmul-rounded":
                return grad
            case unknown:
                assert_never(unknown)

    def reciprocal(self, dtype: torch.dtype) -> Tensor:
        """Return 0-D 1 / count, on the CPU, computed in fp32 and then rounded to `dtype`."""
        return torch.ones((), dtype=torch.float32).div_(self.count).to(dtype)

    def after(self, total: Tensor) -> Tensor:
        """Return what comes of a sum, in its own dtype.

        The quotient is a true one: a product with a rounded 1 / count differs in the last bit.
        """
        if self.rest == 1:
            return total
        return (product if "mul" in self.how else quotient)(total, self.rest)

    def after_(self, wide: Tensor) -> None:
        """Divide in place an fp32 sum that was not divided in its own dtype before."""
        if self.rest != 1 and not self.is_rounded:
            wide.copy_(self.after(wide))


def count_contributions(by: DivideBy, *, rank_count: int, micro_batches: int, rows: int) -> int:
    """Return what one step's sum is divided by.

    Args:
        by: What is counted.
        rank_count: Ranks, of all replicas.
        micro_batches: Micro-batches that all of them had data for.
        rows: Rows that all of them saw in all their micro-batches.
    """
    match by:
        case "ranks":
            return rank_count
        case "micro-batches":
            return micro_batches
        case "tokens":
            return rows
        case unknown:
            assert_never(unknown)
