"""Division by a count, with correct rounding on every device."""

from __future__ import annotations

import torch
from torch import Tensor

from zero_sim.errors import UsageError
from zero_sim.zero.config import Divide


def build_divisor(count: int, *, device: torch.device) -> Tensor:
    """Return `count` as a 0D fp32 tensor, the divisor of `divide_`.

    Raises:
        UsageError: See `set_divisor`.
    """
    # A tensor, because on CUDA torch divides by a Python number by multiplying with its rounded
    # reciprocal. This can be wrong in the last bit unless `count` is a power of two.
    divisor = torch.empty((), dtype=torch.float32, device=device)  # 0D
    set_divisor(divisor, count)
    return divisor


def set_divisor(divisor: Tensor, count: int) -> None:
    """Overwrite a divisor in place, so that all users of the tensor get the new count.

    Args:
        divisor: 0D fp32, from `build_divisor`.
        count: At least 1.

    Raises:
        UsageError: If the count is below 1, or fp32 cannot represent it.
    """
    if count < 1:
        raise UsageError(
            f"expected to divide gradients by at least 1, got a count of {count}. "
            f"Give some rank a row, and call add_rows() for each micro-batch."
        )
    # On the host, to avoid a device sync. fp32 represents an integer if it fits into 24 bits
    # without its trailing zeros.
    if (count // (count & -count)).bit_length() > 24:
        raise UsageError(
            f"expected a count that fp32 can represent, such as any integer up to 2**24, got "
            f"{count}. Call finish_grad_sync(count=...) with a rounded count, equal on every rank."
        )
    divisor.fill_(count)


def scale_before_sum_(values: Tensor, divide: Divide, *, divisor: Tensor) -> None:
    """Divide a rank's own gradients in place, if `divide` does so before the sum.

    Args:
        values: Any shape, fp32, bf16 or fp16.
        divide: The config's `divide`. No-op for `none` and for `post`, which divides after the sum.
        divisor: 0D fp32, from `build_divisor`.
    """
    if divide == "pre":
        divide_(values, divisor=divisor)
    elif divide == "premul":
        multiply_by_reciprocal_(values, divisor=divisor)


def divide_(values: Tensor, *, divisor: Tensor) -> None:
    """Divide in place. Each quotient is rounded once, to the dtype of `values`.

    Args:
        values: Any shape, fp32, bf16 or fp16.
        divisor: 0D fp32, from `build_divisor`.
    """
    if values.dtype is torch.float32:
        values.div_(divisor)
        return
    # 16-bit dtypes cannot represent every count (bf16 rounds 257 to 256, fp16 2049 to 2048), so
    # compute the quotient in fp32. Rounding twice is exact up to a count of 2**12: an fp16 tie has
    # 12 bits (bf16: 9), so its product with the count fits into 24 bits, and fp32 never rounds a
    # quotient onto a tie.
    values.copy_(values.to(torch.float32).div_(divisor))


def multiply_by_reciprocal_(values: Tensor, *, divisor: Tensor) -> None:
    """Multiply in place by `1 / divisor`, rounded to fp32, then to the dtype of `values`.

    Args:
        values: Any shape, fp32, bf16 or fp16.
        divisor: 0D fp32, from `build_divisor`.
    """
    values.mul_(divisor.reciprocal().to(values.dtype))
