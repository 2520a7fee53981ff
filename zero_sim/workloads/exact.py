"""Parts that the exact workloads share: a budget of units, and a hash of a param's bits.

[Note: budgets]
Contributions that are whole numbers of one unit add up without any rounding, in every order, as
long as all positive ones together and all negative ones together stay within `2 ** p` units, where
`p` is the number of bits of a significand: every partial sum is then a whole number that the dtype
holds. An exact workload keeps its gradients, over all ranks and micro-batches of a step, within
that budget, so that its reduced gradient does not depend on the order of addition. It is not
trusted with that: the oracle checks every element of every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from zero_sim.scenario.spec import DtypeName, ModelName, Scenario

EXACT_MODELS: frozenset[ModelName] = frozenset({"bit-hash", "ternary"})
"""Models that claim a reduced gradient which no order of addition changes."""

_SIGNIFICAND_BITS: Final[Mapping[DtypeName, int]] = {"fp32": 24, "bf16": 8, "fp16": 11}
_MASK = 0xFFFFFFFF


def budget_units(scenario: Scenario) -> int:
    """Units that may be added into one element in a step, of either sign; see [Note: budgets]."""
    return 2 ** _SIGNIFICAND_BITS[scenario.model.dtype]


def hash_bits(values: Tensor, *, salt: int) -> Tensor:
    """Hash each element's bits, its place and a salt.

    Args:
        values: 1D, of 2 or 4 bytes an element.
        salt: At least 0, less than 2**31.

    Returns:
        1D int64, each 0 to 2**32 - 1; one flipped bit changes an element's hash as a whole.
    """
    integer = torch.int16 if values.element_size() == 2 else torch.int32
    mixed = values.detach().contiguous().view(integer).long() & _MASK
    mixed = mixed ^ (torch.arange(len(mixed), device=mixed.device) * 0x9E3779 & _MASK) ^ salt
    # The factor has 27 bits, so that no product leaves 64.
    for _ in range(2):
        mixed = ((mixed >> 16) ^ mixed) * 0x45D9F3B & _MASK
    return (mixed >> 16) ^ mixed


class HashedTernary(torch.autograd.Function):
    """Forward: each element's bits, hashed to -1, 0 or 1. Backward: the gradient as it is."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        """Return a tensor of the weight's shape and dtype."""
        hashes = hash_bits(weight.reshape(-1), salt=0)
        return (hashes % 3 - 1).to(weight.dtype).view(weight.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Straight through."""
        return grads[0]


class Clamped(torch.autograd.Function):
    """Clamp to -1 to 1, both the values and, not masked, their gradient: so both stay small."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return a tensor of the same shape."""
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Straight through, clamped."""
        return grads[0].clamp(-1, 1)
