"""Poison: the content of outputs while their operation is in flight.

Floating-point elements become NaNs with a payload that nothing else produces, so a value read too
early spreads to the results and is recognisable in a debugger. Integers get bytes of 0xA5. A bool
becomes True, because its byte must be 0 or 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FLOATS = {
    torch.float64: 0x7FFDEAD5A5A5DEAD,
    torch.float32: 0x7FDEAD5A,
    torch.bfloat16: 0x7FDE,
    torch.float16: 0x7EAD,
    # 8-bit NaNs have few or no payload bits.
    torch.float8_e4m3fn: 0x7F,
    torch.float8_e5m2: 0x7E,
    torch.float8_e4m3fnuz: 0x80,
    torch.float8_e5m2fnuz: 0x80,
    torch.float8_e8m0fnu: 0xFF,
}


def bits_of(tensor: Tensor) -> Tensor:
    """View elements as integers of the same size, and complex elements as two integers."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_WORDS[tensor.element_size()])


def poison_of(dtype: torch.dtype) -> int:
    """Return an element's poison as an unsigned number; for complex dtypes, the real part's."""
    if dtype.is_complex:
        dtype = dtype.to_real()
    if dtype is torch.bool:
        return 1
    return _FLOATS.get(dtype, int.from_bytes(b"\xa5" * dtype.itemsize))


def poison(tensor: Tensor) -> None:
    """Overwrite every element with poison."""
    bits = bits_of(tensor)
    bits.fill_(_as_word(poison_of(tensor.dtype), bits))


def is_poison(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return elementwise True if bits of a `dtype` tensor are poison."""
    return bits == _as_word(poison_of(dtype), bits)


def poisoned(tensor: Tensor) -> Tensor:
    """Return elementwise True for poison, including bf16 poison widened to fp32."""
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=torch.bool, device=tensor.device)
    bits = bits_of(tensor.contiguous())
    held = is_poison(bits, tensor.dtype)
    # A bf16 is the upper half of an fp32, so widening shifts its bits.
    if tensor.dtype is torch.float32:
        held |= bits == poison_of(torch.bfloat16) << 16
    return held


def _as_word(pattern: int, bits: Tensor) -> int:
    """Return a bit pattern as a number in the words' dtype, which is signed except for bytes."""
    limit = 1 << 8 * bits.element_size()
    return pattern - limit if bits.dtype.is_signed and pattern >= limit // 2 else pattern
