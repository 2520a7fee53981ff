"""Placement of params in memory, modulo a vector's width: it can change the bits of a product.

[Note: addresses]
A matrix product with a vector (one row of inputs, or one output) starts its vector loop at an
aligned address of the weight and sums the elements before it apart. So the same weight gives other
bits at another address: measured with torch 2.13 on AVX-512, in 57 % of fp32 linears on one row,
in about 1 % on a few rows, in none of bf16. The address modulo 64 bytes decides. A system keeps
its params inside flat buffers, and the reference knows no buffers; so it is told that number as an
observed fact. On a GPU torch tells cuBLASLt the alignment of each operand, up to 256 bytes, by
which it chooses a kernel, and its allocator gives multiples of 512: that is what counts there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_MODULUS_BYTES_ON_CPU, _MODULUS_BYTES_ELSEWHERE = 64, 512


@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """How a param lies in memory, as far as it can change the bits of a product."""

    address: int
    """Address modulo `modulus_bytes` of its device; 0 where there are no elements."""
    strides: tuple[int, ...]
    """In elements, as torch gives them."""


Addresses = Mapping[str, MemoryLayout]
"""By param: how it lies in memory."""


def modulus_bytes(device: torch.device) -> int:
    """Return modulo what an address counts on a device."""
    return _MODULUS_BYTES_ON_CPU if device.type == "cpu" else _MODULUS_BYTES_ELSEWHERE


def memory_layout_of(tensor: Tensor) -> MemoryLayout:
    """Return how a tensor lies in memory."""
    return MemoryLayout(tensor.data_ptr() % modulus_bytes(tensor.device), tensor.stride())


def move_params(params: Mapping[str, nn.Parameter], addresses: Addresses) -> None:
    """Move params to storage of their own at the given addresses and strides, values unchanged.

    Args:
        params: Params by name.
        addresses: Where to; params without an entry stay, and so do those without elements.
    """
    for name, param in params.items():
        wanted = addresses.get(name)
        if wanted is not None and param.numel() and memory_layout_of(param) != wanted:
            param.data = _copy_at(param.detach(), wanted)


def _copy_at(value: Tensor, wanted: MemoryLayout) -> Tensor:
    reach = zip(value.shape, wanted.strides, strict=True)
    nbytes = (1 + sum((size - 1) * stride for size, stride in reach)) * value.element_size()
    modulus = modulus_bytes(value.device)
    raw = torch.empty(nbytes + modulus, dtype=torch.uint8, device=value.device)
    start = (wanted.address - raw.data_ptr()) % modulus
    flat = raw[start : start + nbytes].view(value.dtype)
    return flat.as_strided(value.shape, wanted.strides).copy_(value)
