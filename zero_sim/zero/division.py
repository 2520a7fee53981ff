"""Division by the world size, correctly rounded on every device."""

from __future__ import annotations

import torch
from torch import Tensor


def build_divisor(count: int, *, device: torch.device) -> Tensor:
    """Return `count` as a 0D fp32 tensor, the form in which `divide_` takes it.

    Not a Python number: on CUDA, torch divides by a number by multiplying with its rounded
    reciprocal, which is wrong in the last bit wherever `count` is not a power of two.
    """
    return torch.full((), count, dtype=torch.float32, device=device)  # 0D


def divide_(values: Tensor, *, divisor: Tensor) -> None:
    """Divide in place, each quotient rounded once to the dtype of `values`.

    Args:
        values: Any shape, fp32 or bf16.
        divisor: 0D fp32, from `build_divisor`.
    """
    if values.dtype is torch.float32:
        values.div_(divisor)
        return
    # bf16 cannot hold every world size (257 would become 256), so the quotient is taken in fp32;
    # fp32 has more than twice the bits of bf16 and two, so rounding twice is rounding once.
    values.copy_(values.to(torch.float32).div_(divisor))
