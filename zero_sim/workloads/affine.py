"""A linear layer built from given bits: no default init, no global random numbers, cheap."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, kw_only=True, slots=True)
class AffineBits:
    """The initial weights of one layer; `Affine` copies them."""

    weight: Tensor  # 2D (out, in)
    bias: Tensor  # 1D (out,)


class Affine(nn.Module):
    """`y = x @ weight.T + bias`, as `torch.nn.Linear`, with its params copied from `bits`.

    `torch.nn.Linear` draws an init from the global generator first, which is thrown away here and
    costs more time than the copy.
    """

    weight: nn.Parameter  # 2D (out, in)
    bias: nn.Parameter  # 1D (out,)

    def __init__(self, bits: AffineBits) -> None:
        super().__init__()
        self.register_parameter("weight", nn.Parameter(bits.weight.clone()))
        self.register_parameter("bias", nn.Parameter(bits.bias.clone()))

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` (..., in) to (..., out)."""
        return functional.linear(x, self.weight, self.bias)


def draw_affine(
    generator: torch.Generator, *, inputs: int, outputs: int, dtype: torch.dtype
) -> AffineBits:
    """Draw weight, then bias, uniform within 1/sqrt(inputs) of 0, torch's own default range."""
    bound = 1.0 / math.sqrt(inputs)
    weight = torch.empty(outputs, inputs).uniform_(-bound, bound, generator=generator)
    bias = torch.empty(outputs).uniform_(-bound, bound, generator=generator)
    return AffineBits(weight=weight.to(dtype), bias=bias.to(dtype))
