"""Division by a count, correctly rounded on every device."""

from __future__ import annotations

import torch
from torch import Tensor

from zero_sim.errors import UsageError
from zero_sim.zero.config import Divide


def build_divisor(count: int, *, device: torch.device) -> Tensor:
    """Return `count` as a 0D fp32 tensor, the form in which `divide_` takes it.

    Not a Python number: on CUDA, torch divides by a number by multiplying with its rounded
    reciprocal, which is wrong in the last bit wherever `count` is not a power of two.

    Raises:
        UsageError: As `set_divisor`.
    """
    divisor = torch.empty((), dtype=torch.float32, device=device)  # 0D
    set_divisor(divisor, count)
    return divisor


def set_divisor(divisor: Tensor, count: int) -> None:
    """Overwrite a divisor, so that whoever holds it sees the new count.

    Args:
        divisor: 0D fp32, from `build_divisor`.
        count: At least 1.

    Raises:
        UsageError: If nothing was counted, or fp32 cannot hold the count.
    """
    if count < 1:
        raise UsageError(
            f"expected to divide gradients by at least 1, got a count of {count}. "
            f"Try a step in which some rank has a row, and add_rows() for each micro-batch."
        )
    # Without a look at the device: fp32 holds an integer if 24 bits hold all but its last zeros.
    if (count // (count & -count)).bit_length() > 24:
        raise UsageError(
            f"expected a count that fp32 can hold, as every integer up to 2**24, got {count}. "
            f"Try finish_grad_sync(count=...) with a rounded count, the same on every rank."
        )
    divisor.fill_(count)


def scale_before_sum_(values: Tensor, divide: Divide, *, divisor: Tensor) -> None:
    """Do in place to a rank's own gradients what `divide` does before the sum.

    Args:
        values: Any shape, fp32, bf16 or fp16.
        divide: Where gradients are divided; after the sum nothing is left to do here.
        divisor: 0D fp32, from `build_divisor`.
    """
    if divide == "pre":
        divide_(values, divisor=divisor)
    elif divide == "premul":
        multiply_by_reciprocal_(values, divisor=divisor)


def divide_(values: Tensor, *, divisor: Tensor) -> None:
    """Divide in place, each quotient rounded once to the dtype of `values`.

    Args:
        values: Any shape, fp32, bf16 or fp16.
        divisor: 0D fp32, from `build_divisor`.
    """
    if values.dtype is torch.float32:
        values.div_(divisor)
        return
    # 16 bits cannot hold every count (bf16 makes 256 of 257, fp16 2048 of 2049), so the quotient is
    # taken in fp32. Rounding twice is rounding once up to a count of 2**12: a tie of fp16 has 12
    # bits (of bf16 9), its product with the count then fits into 24, and a quotient that is no tie
    # is never rounded to one.
    values.copy_(values.to(torch.float32).div_(divisor))


def multiply_by_reciprocal_(values: Tensor, *, divisor: Tensor) -> None:
    """Multiply in place by `1 / divisor`, rounded to fp32, then to the dtype of `values`.

    Args:
        values: Any shape, fp32, bf16 or fp16.
        divisor: 0D fp32, from `build_divisor`.
    """
    values.mul_(divisor.reciprocal().to(values.dtype))
