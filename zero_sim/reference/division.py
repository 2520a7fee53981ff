"""Division of the sum over ranks: timing, operation, dtype and divisor.

[Note: rules of division]
These rules give the same mean in mathematics, but round differently:

- `pre`: each rank divides before the sum, in the gradient dtype;
- `premul`: each rank multiplies by the reciprocal, after rounding it to the gradient dtype;
- `premul-fp32`: each rank multiplies by the fp32 reciprocal; the product is rounded;
- `post`: the sum is divided after conversion to fp32;
- `post-rounded`: the sum is divided in its own dtype;
- `postmul`, `postmul-rounded`: like the last two, but multiplying by the fp32 reciprocal.

In fp32, `premul` equals `premul-fp32`, and `-rounded` makes no difference.

Upstream uses:

- `premul`: DDP's reducer;
- `premul-fp32`: Megatron's DDP, and NCCL's PREMUL_SUM by a number;
- `pre`: DDP's default comm hook, and DeepSpeed's stages 1 to 3;
- `post-rounded`: gloo's AVG, and FSDP2 if it forces a sum;
- `postmul-rounded`: DeepSpeed's stage 0;
- one factor before the sum and the rest after it: FSDP1, FSDP2 in fp16, and DeepSpeed with
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
"""Rule for a collective's AVG, by summation order. None if no rule fits; `post-rounded` for orders
not listed."""
DivideBy = Literal["ranks", "micro-batches", "tokens"]


def quotient(values: Tensor, number: float) -> Tensor:
    """Return a tensor divided by a number, rounded once to the tensor's dtype."""
    # Divide in fp32, because bf16 cannot represent 257, nor fp16 2049. fp32 has more than twice
    # their bits plus two, so the second rounding meets no tie that the first created.
    wide = values if values.dtype is torch.float64 else values.to(torch.float32)
    # A tensor on the same device: CUDA multiplies by the rounded reciprocal if the divisor is a
    # number or a CPU tensor, and that differs in the last bit.
    divisor = torch.full((), number, dtype=wide.dtype, device=wide.device)
    return wide.div(divisor).to(values.dtype)


def product(values: Tensor, number: float) -> Tensor:
    """Return a tensor times a number's fp32 reciprocal, rounded once to the tensor's dtype."""
    # In fp32, as in `quotient`.
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
    """Divisor on each rank before the sum, with the rest applied after it; None for a single
    division. If set, `how` is the rule after the sum."""
    each_round: bool = False
    """True to divide each round's sum, then add the quotients."""

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
        """Return a rank's contribution to the sum, rounded once to the gradient dtype."""
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
        # Nothing to divide: return the same tensor.
        if self.rest == 1:
            return total
        # A true quotient unless the rule multiplies, because a product with the rounded reciprocal
        # differs in the last bit.
        return (product if "mul" in self.how else quotient)(total, self.rest)

    def after_(self, wide: Tensor) -> None:
        """Divide an fp32 sum in place, unless it was already divided in its own dtype."""
        if self.rest != 1 and not self.is_rounded:
            wide.copy_(self.after(wide))


def count_contributions(by: DivideBy, *, rank_count: int, micro_batches: int, rows: int) -> int:
    """Return the divisor for one step's sum.

    Counts cover all replicas. Micro-batches without data do not count.
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
