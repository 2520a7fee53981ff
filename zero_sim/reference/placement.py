"""Placement of params in memory, because it can change the bits of matrix products.

[Note: addresses]
A matrix-vector product (one input row, or one output) starts its vector loop at an aligned weight
address, and sums the elements before it separately. So the same weight can give other bits at
another address. With torch 2.13 on AVX-512, this happened in 57 % of fp32 linears on one row, in
about 1 % on a few rows, and never in bf16. Only the address modulo 64 bytes matters. Systems keep
params in flat buffers, whose layout the reference does not know, so it uses the observed addresses.
On a GPU, torch passes each operand's alignment, up to 256 bytes, to cuBLASLt, which chooses a
kernel by it. torch's allocator returns multiples of 512 bytes, so the modulus is 512 there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# AVX-512 vector width, and granularity of torch's CUDA allocator; see [Note: addresses].
_MODULUS_BYTES_ON_CPU, _MODULUS_BYTES_ELSEWHERE = 64, 512


@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """A param's address and strides, as far as they can change bits."""

    address: int
    """Address modulo `modulus_bytes` of its device; 0 without elements."""
    strides: tuple[int, ...]
    """Strides in elements, as in torch."""


Addresses = Mapping[str, MemoryLayout]
"""Memory layouts by param."""


def modulus_bytes(device: torch.device) -> int:
    """Return a device's address modulus, in bytes."""
    return _MODULUS_BYTES_ON_CPU if device.type == "cpu" else _MODULUS_BYTES_ELSEWHERE


def memory_layout_of(tensor: Tensor) -> MemoryLayout:
    """Return a tensor's memory layout."""
    return MemoryLayout(tensor.data_ptr() % modulus_bytes(tensor.device), tensor.stride())


def move_params(params: Mapping[str, nn.Parameter], addresses: Addresses) -> None:
    """Move params to their own storage at the given addresses and strides, keeping their values.

    Params without a wanted layout or without elements stay.
    """
    for name, param in params.items():
        wanted = addresses.get(name)
        # Params without elements have no address.
        if wanted is not None and param.numel() and memory_layout_of(param) != wanted:
            param.data = _copy_at(param.detach(), wanted)


def _copy_at(value: Tensor, wanted: MemoryLayout) -> Tensor:
    # Bytes from the first to the last element at these strides.
    reach = zip(value.shape, wanted.strides, strict=True)
    nbytes = (1 + sum((size - 1) * stride for size, stride in reach)) * value.element_size()
    modulus = modulus_bytes(value.device)
    raw = torch.empty(nbytes + modulus, dtype=torch.uint8, device=value.device)
    # Over-allocated by the modulus, so some byte has the wanted address.
    start = (wanted.address - raw.data_ptr()) % modulus
    flat = raw[start : start + nbytes].view(value.dtype)
    # Strides may leave gaps between elements, so copy through a strided view.
    return flat.as_strided(value.shape, wanted.strides).copy_(value)
