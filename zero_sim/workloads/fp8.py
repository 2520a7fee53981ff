"""`fp8`: the blocks of `mlp` with fp8 weight matrices, each with a scale.

A weight `X` is an fp8 param. It represents `X * X_scale`, where the scale is a 0-D fp32 buffer. A
trainer finds the scale by this name, steps the product and writes both. The param's gradient is the
product's gradient, in `X.grad_dtype`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from zero_sim.scenario.spec import Scenario
from zero_sim.workloads.draws import weight_generator, working_dtype
from zero_sim.workloads.linear import draw_linear
from zero_sim.workloads.mlp import MlpWorkload
from zero_sim.workloads.protocol import Batch

SCALE_SUFFIX = "_scale"
"""Suffix that turns a param's name into its scale's name."""
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)

_EXPANSION = 4
# Formats for the up and down projections.
_FORMATS = {
    "e4m3": (torch.float8_e4m3fn, torch.float8_e4m3fn),
    "e5m2": (torch.float8_e5m2, torch.float8_e5m2),
    "mixed": (torch.float8_e4m3fn, torch.float8_e5m2),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Bits:
    """A layer's initial weights; `Fp8Affine` copies them."""

    weight: Tensor  # 2D (out, in), fp8
    scale: Tensor  # 0D fp32
    bias: Tensor  # 1D (out,)


class _Dequantize(torch.autograd.Function):
    """`values * scale`, rounded to a dtype. Backward passes the gradient on unchanged."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        # In fp32, because fp8 has no arithmetic.
        return (values.to(torch.float32) * scale).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        # torch's own cast would round the gradient to fp8.
        return grad_outputs[0], None, None


class Fp8Affine(nn.Module):
    """`y = x @ (weight * weight_scale).T + bias`, computed in the bias dtype."""

    weight: nn.Parameter  # 2D (out, in), fp8; its gradient has the bias dtype
    weight_scale: Tensor  # 0D fp32
    bias: nn.Parameter  # 1D (out,)

    def __init__(self, bits: Fp8Bits) -> None:
        super().__init__()
        self.register_parameter("weight", nn.Parameter(bits.weight.clone()))
        # Otherwise autograd would expect a gradient in fp8.
        self.weight.grad_dtype = bits.bias.dtype
        self.register_buffer("weight" + SCALE_SUFFIX, bits.scale.clone())
        self.register_parameter("bias", nn.Parameter(bits.bias.clone()))

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` (..., in) to (..., out)."""
        weight = _Dequantize.apply(self.weight, self.weight_scale, self.bias.dtype)
        return functional.linear(x, weight, self.bias)


class Fp8Block(nn.Module):
    """`x + down(relu(up(x)))`, with an inner layer four times as wide."""

    def __init__(self, up: Fp8Bits, down: Fp8Bits) -> None:
        super().__init__()
        self.up = Fp8Affine(up)
        self.down = Fp8Affine(down)

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` (rows, hidden) to the same shape."""
        return x + self.down(functional.relu(self.up(x)))


class Fp8Workload:
    """The `mlp` task, with fp8 weights and biases in the working dtype."""

    def __init__(self, scenario: Scenario) -> None:
        """Draw the initial weights.

        Args:
            scenario: Uses the same settings as `mlp`, and `model.fp8_format`.
        """
        self._mlp = MlpWorkload(scenario)
        generator, dtype = weight_generator(scenario), working_dtype(scenario.model.dtype)
        hidden = scenario.model.hidden
        inner = _EXPANSION * hidden
        up_dtype, down_dtype = _FORMATS[scenario.model.fp8_format]

        def draw(inputs: int, outputs: int, fp8: torch.dtype) -> Fp8Bits:
            bits = draw_linear(generator, inputs=inputs, outputs=outputs, dtype=torch.float32)
            # Not a power of two, because trainers must handle any initial scale.
            scale = bits.weight.abs().amax() / torch.finfo(fp8).max
            return Fp8Bits(
                weight=(bits.weight / scale).to(fp8), scale=scale, bias=bits.bias.to(dtype)
            )

        # `up` and `down` of each block
        self._blocks = tuple(
            (draw(hidden, inner, up_dtype), draw(inner, hidden, down_dtype))
            for _ in range(scenario.model.blocks)
        )

    def build(self) -> nn.Module:
        """Return the blocks in order; the params start with `0.up.weight`, `0.up.bias`."""
        return nn.Sequential(*(Fp8Block(up, down) for up, down in self._blocks))

    def batch(self, *, step: int, rank: int, micro: int) -> Batch:
        """Return inputs and targets, both (rows, hidden) in the working dtype."""
        return self._mlp.batch(step=step, rank=rank, micro=micro)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return the squared error in fp32, as `mlp`."""
        return self._mlp.loss(module, batch)

    def accuracy(self, module: nn.Module) -> float | None:
        """Return None: nothing is held out."""
        return None
