"""Tensors that hold equally many elements and still would be misread: other shape, other format.

NCCL moves memory and knows no shapes. So two ranks that see the same bytes as (2, 3) and as (3, 2)
put them to different elements, while one that sees them as (6,) only keeps them flat.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def shape_of(tensor: Tensor) -> tuple[object, ...]:
    """Dtype and shape, and the strides where they are not those of a contiguous tensor."""
    if tensor.is_contiguous():
        return tensor.dtype, tensor.shape
    return tensor.dtype, tensor.shape, tensor.stride()


def is_contiguous(tensor: Tensor) -> bool:
    """Whether NCCL takes it: contiguous in the plain or in a channels-last format."""
    if tensor.is_contiguous():
        return True
    memory_format = _FORMATS.get(tensor.dim())
    return memory_format is not None and tensor.is_contiguous(memory_format=memory_format)


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a stretch of memory without gap or overlap, in any order."""
    expected = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent == 1:
            continue
        if stride != expected:
            return tensor.numel() == 0
        expected *= extent
    return True


def misread(a: Tensor, b: Tensor) -> Literal["shape", "memory-format"] | None:
    """In what two tensors differ whose memory is taken for each other's, if it matters.

    Args:
        a: One rank's tensor.
        b: Another rank's, of as many elements.
    """
    if a.numel() == 0:
        return None
    if a.shape != b.shape:
        squeezed = [[extent for extent in tensor.shape if extent != 1] for tensor in (a, b)]
        if min(map(len, squeezed)) >= 2 and squeezed[0] != squeezed[1]:
            return "shape"
        return None if _memory_order(a) == _memory_order(b) == [] else "memory-format"
    return None if _memory_order(a) == _memory_order(b) else "memory-format"


def _memory_order(tensor: Tensor) -> list[int]:
    """Strides of the dimensions longer than 1; empty where they are the contiguous ones."""
    if tensor.is_contiguous():
        return []
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return [stride for extent, stride in pairs if extent != 1]
