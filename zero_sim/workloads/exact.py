"""Common parts of exact workloads: a budget of units, and a hash over a param's bits.

[Note: budgets]
Multiples of one unit add without rounding in every order if they stay within a budget: all positive
terms together, and all negative terms together, are at most `2 ** p` units, where `p` counts
significand bits. Every partial sum is then a representable multiple. An exact workload keeps its
gradients within this budget, over all ranks and micro-batches in a step. So its reduced gradient
does not depend on the summation order. The reference does not trust this, and certifies each
element in each step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from zero_sim.scenario.spec import DtypeName, ModelName, Scenario

EXACT_MODELS: frozenset[ModelName] = frozenset({"bit-hash", "ternary"})
"""Models that promise a reduced gradient that is the same in every summation order."""

# With the implicit leading bit.
_SIGNIFICAND_BITS: Final[Mapping[DtypeName, int]] = {"fp32": 24, "bf16": 8, "fp16": 11}
_MASK = 0xFFFFFFFF


def budget_units(scenario: Scenario) -> int:
    """Return the units that a step may add per element and sign; see [Note: budgets]."""
    return 2 ** _SIGNIFICAND_BITS[scenario.model.dtype]


def hash_bits(values: Tensor, *, salt: int) -> Tensor:
    """Hash each element's bits with its position and a salt.

    Args:
        values: 1D, with 2 or 4 bytes per element.
        salt: At least 0, less than 2**31.

    Returns:
        1D int64, from 0 to 2**32 - 1. A single flipped bit changes the whole hash of its element.
    """
    integer = torch.int16 if values.element_size() == 2 else torch.int32
    # The bits as unsigned numbers.
    mixed = values.detach().contiguous().view(integer).long() & _MASK
    # Mix in the position, so that elements that trade places are noticed.
    mixed = mixed ^ (torch.arange(len(mixed), device=mixed.device) * 0x9E3779 & _MASK) ^ salt
    # The factor has 27 bits, so products fit into 64.
    for _ in range(2):
        mixed = ((mixed >> 16) ^ mixed) * 0x45D9F3B & _MASK
    return (mixed >> 16) ^ mixed


class HashedTernary(torch.autograd.Function):
    """Forward: each element's bits, hashed to -1, 0 or 1. Backward: the gradient, unchanged."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        """Return a tensor with the weight's shape and dtype."""
        # Salt 0, so that the hash depends on bits and position only.
        hashes = hash_bits(weight.reshape(-1), salt=0)
        return (hashes % 3 - 1).to(weight.dtype).view(weight.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Return the gradient unchanged: straight through."""
        return grads[0]


class Clamped(torch.autograd.Function):
    """Clamp values to [-1, 1], and gradients too (unmasked), so that both stay small."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return a tensor of the same shape."""
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Return the gradient, clamped."""
        return grads[0].clamp(-1, 1)
