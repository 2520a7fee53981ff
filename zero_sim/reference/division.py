"""Division of the sum over ranks: time, operation, dtype and divisor.

[Note: rules of division]
In mathematics, a sum over ranks has a single mean. In floating point these rules differ:

- `pre`: each rank divides before the sum, in the gradient's dtype;
- `premul`: each rank multiplies by the reciprocal, rounded to the gradient's dtype first;
- `premul-fp32`: each rank multiplies by the fp32 reciprocal; the product is rounded;
- `post`: the sum is divided after conversion to fp32;
- `post-rounded`: the sum is divided in its own dtype;
- `postmul`, `postmul-rounded`: as the last two, but multiplied by the fp32 reciprocal.

In fp32, `premul` equals `premul-fp32`, and `-rounded` makes no difference.

Upstream uses:

- `premul`: DDP's reducer;
- `premul-fp32`: Megatron's DDP, and NCCL's PREMUL_SUM by a number;
- `pre`: DDP's default comm hook, and DeepSpeed's stages 1 to 3;
- `post-rounded`: AVG of gloo, and FSDP2 if it forces a sum;
- `postmul-rounded`: DeepSpeed's stage 0;
- by one factor before the sum and by the rest after it: FSDP1, FSDP2 in fp16, and DeepSpeed with
  `prescale_gradients`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, assert_never, get_args

import torch
from torch import Tensor

Divide = Literal["none", "pre", "post", "premul"]
"""Rules that a scenario can choose."""
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
"""Rules that a system can have; see [Note: rules of division]."""

DIVIDE_RULES: tuple[DivideRule, ...] = get_args(DivideRule)

# NCCL's rings multiply each rank's input by the reciprocal. Its symmetric kernels multiply
# the accumulated sum instead, which no rule of a scenario does.
AVERAGES: Mapping[str, Divide | None] = {"nccl-ring": "premul", "nccl-sym": None}
"""Rule of a collective's AVG, by summation order; `post-rounded` for orders not listed."""
DivideBy = Literal["ranks", "micro-batches", "tokens"]


def quotient(values: Tensor, number: float) -> Tensor:
    """Return a tensor divided by a number, rounded once to the tensor's dtype."""
    # bf16 cannot represent 257, nor fp16 2049, so the quotient is taken in fp32. fp32 has more
    # than twice their bits and two, so the second rounding meets no tie made by the first.
    wide = values if values.dtype is torch.float64 else values.to(torch.float32)
    # A tensor on the same device: CUDA multiplies by the rounded reciprocal if the divisor is a
    # number or a CPU tensor, and that differs in the last bit.
    divisor = torch.full((), number, dtype=wide.dtype, device=wide.device)
    return wide.div(divisor).to(values.dtype)


def product(values: Tensor, number: float) -> Tensor:
    """Return a tensor times the fp32 reciprocal of a number, rounded once to its dtype."""
    # In fp32 for the reason given in `quotient`.
    wide = values.to(torch.float32)
    factor = torch.tensor(1.0 / number, dtype=torch.float32, device=wide.device)
    return wide.mul(factor).to(values.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """Division of one step's sums."""

    how: DivideRule
    count: float
    """Total divisor."""
    first: float | None = None
    """Divisor of each rank before the sum, with the rest applied after it; None for a single
    division. If set, `how` is a rule for after the sum."""
    each_round: bool = False
    """True to divide each round's sum, and then add the quotients."""

    @property
    def is_before(self) -> bool:
        """True if ranks divide before the sum."""
        return self.how in ("pre", "premul", "premul-fp32") or self.first is not None

    @property
    def is_rounded(self) -> bool:
        """True if a sum is divided in its own dtype."""
        return self.how.endswith("-rounded") or self.each_round

    @property
    def rest(self) -> float:
        """Divisor still to apply to a sum; 1 if there is none."""
        if not self.how.startswith("post"):
            return 1
        return self.count if self.first is None else self.count / self.first

    def before(self, grad: Tensor) -> Tensor:
        """Return a rank's contribution to the sum, rounded once to the dtype of `grad`."""
        if self.first is not None:
            # The operation is the same before and after the sum.
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
        """Return 1 / count, 0-D, on the CPU, computed in fp32 and then rounded to `dtype`."""
        return torch.ones((), dtype=torch.float32).div_(self.count).to(dtype)

    def after(self, total: Tensor) -> Tensor:
        """Return the divided sum, in its own dtype."""
        # Division by 1 is skipped, so that a sum without division is returned as it is.
        if self.rest == 1:
            return total
        # Unless the rule multiplies, a true quotient: times a rounded 1 / count, the last bit
        # differs.
        return (product if "mul" in self.how else quotient)(total, self.rest)

    def after_(self, wide: Tensor) -> None:
        """Divide an fp32 sum in place, unless it was already divided in its own dtype."""
        if self.rest != 1 and not self.is_rounded:
            wide.copy_(self.after(wide))


def count_contributions(by: DivideBy, *, rank_count: int, micro_batches: int, rows: int) -> int:
    """Return the divisor of one step's sum.

    Args:
        by: Unit of counting.
        rank_count: Number of ranks, of all replicas.
        micro_batches: Number of micro-batches with data, of all ranks.
        rows: Number of rows in these micro-batches.
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
