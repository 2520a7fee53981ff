"""Poison: the contents of memory while an operation that will write it is in flight.

Floating-point elements are NaNs with a payload that nothing else makes, so that a value read too
early is seen in the result and known in a debugger; bytes of integers are 0xA5; a bool is True,
for no other byte but 0 and 1 may stand there.
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
    torch.float8_e4m3fn: 0x7F,
    torch.float8_e5m2: 0x7E,
    torch.float8_e4m3fnuz: 0x80,
    torch.float8_e5m2fnuz: 0x80,
    torch.float8_e8m0fnu: 0xFF,
}


def bits_of(tensor: Tensor) -> Tensor:
    """A view of a tensor's elements as whole numbers of their size; complex ones as two each."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_WORDS[tensor.element_size()])


def poison_of(dtype: torch.dtype) -> int:
    """The poison of one element as an unsigned number, of its real part for a complex dtype."""
    if dtype.is_complex:
        dtype = dtype.to_real()
    if dtype is torch.bool:
        return 1
    return _FLOATS.get(dtype, int.from_bytes(b"\xa5" * dtype.itemsize))


def poison(tensor: Tensor) -> None:
    """Overwrite every element."""
    bits = bits_of(tensor)
    bits.fill_(_as_word(poison_of(tensor.dtype), bits))


def is_poison(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Elementwise, whether bits of a tensor of that dtype are still its poison."""
    return bits == _as_word(poison_of(dtype), bits)


def poisoned(tensor: Tensor) -> Tensor:
    """Elementwise, whether a tensor holds poison, in fp32 also of bf16 that was made wider."""
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=torch.bool, device=tensor.device)
    bits = bits_of(tensor.contiguous())
    held = is_poison(bits, tensor.dtype)
    if tensor.dtype is torch.float32:
        held |= bits == poison_of(torch.bfloat16) << 16
    return held


def _as_word(pattern: int, bits: Tensor) -> int:
    """The number that fills a tensor of words, all but single bytes signed, with a bit pattern."""
    limit = 1 << 8 * bits.element_size()
    return pattern - limit if bits.dtype.is_signed and pattern >= limit // 2 else pattern
