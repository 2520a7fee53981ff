"""`nn.Linear` from given bits: cheap, without default init or global random numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearBits:
    """A layer's initial weights."""

    weight: Tensor  # 2D (out, in)
    bias: Tensor  # 1D (out,)


def build_linear(bits: LinearBits) -> nn.Linear:
    """Return a fresh layer with copies of `bits` as its params."""
    # The constructor would draw initial values from the global generator, which costs more than a
    # copy.
    layer = nn.Linear.__new__(nn.Linear)
    nn.Module.__init__(layer)
    # Attributes that the constructor would set.
    layer.out_features, layer.in_features = bits.weight.shape
    layer.register_parameter("weight", nn.Parameter(bits.weight.clone()))
    layer.register_parameter("bias", nn.Parameter(bits.bias.clone()))
    return layer


def draw_linear(
    generator: torch.Generator, *, inputs: int, outputs: int, dtype: torch.dtype
) -> LinearBits:
    """Draw weight, then bias, uniform within 1/sqrt(inputs), torch's default range."""
    # Drawn in fp32 and then cast, so that all dtypes start from the same draws.
    bound = 1.0 / math.sqrt(inputs)
    weight = torch.empty(outputs, inputs).uniform_(-bound, bound, generator=generator)
    bias = torch.empty(outputs).uniform_(-bound, bound, generator=generator)
    return LinearBits(weight=weight.to(dtype), bias=bias.to(dtype))
