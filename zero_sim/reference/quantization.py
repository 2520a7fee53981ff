"""Params in fp8: what they stand for, and how a master becomes one; on whole params.

A scale is chosen from the greatest magnitude of the whole master: the least power of two that
brings it within the format, but never one with which the scale is less than 2**-126 or the
format's greatest number more than fp32 has. Where that magnitude is zero or not finite the scale
is 1. Values outside the format become its greatest number, with their sign.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zero_sim.workloads.fp8 import FP8_DTYPES, SCALE_SUFFIX

_SCALE_MIN = 2.0**-126


def find_scales(module: nn.Module) -> dict[str, Tensor]:
    """Return the live 0-D fp32 scale of every fp8 param of a module, by the param's name."""
    return {
        name: module.get_buffer(name + SCALE_SUFFIX)
        for name, param in module.named_parameters()
        if param.dtype in FP8_DTYPES
    }


def decode(values: Tensor, *, scale: Tensor) -> Tensor:
    """Return as new fp32 what fp8 values and their 0-D fp32 scale stand for."""
    return values.detach().float() * scale


def encode(master: Tensor, *, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an fp32 master as fp8 values at a 0-D fp32 scale, in a shape of its own."""
    greatest = torch.finfo(dtype).max
    return (master / scale).clamp(min=-greatest, max=greatest).to(dtype)


def scale_for(master: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Return the 0-D fp32 scale that a whole fp32 master asks for."""
    amax = master.abs().max().item() if master.numel() else 0.0
    if amax == 0 or not math.isfinite(amax):
        return torch.ones((), device=master.device)
    greatest = torch.finfo(dtype).max
    # Powers of two, and quotients by them, are exact in Python's floats.
    scale = _SCALE_MIN
    fp32_max = torch.finfo(torch.float32).max
    while amax / scale > greatest and 2 * scale * greatest <= fp32_max:
        scale *= 2
    return torch.tensor(scale, dtype=torch.float32, device=master.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkingParams:
    """The form of the working params."""

    dtypes: Mapping[str, torch.dtype]
    """By param."""
    scales: Mapping[str, Tensor]
    """Of params in fp8, before the step."""

    def cast(self, name: str, master: Tensor, *, is_stepped: bool) -> Tensor:
        """Return the working param of a master.

        Args:
            name: Of the param.
            master: fp32.
            is_stepped: Whether the step moved it, which gives a param in fp8 another scale.
        """
        dtype = self.dtypes[name]
        if name not in self.scales:
            return master.to(dtype)
        scale = scale_for(master, dtype=dtype) if is_stepped else self.scales[name]
        return encode(master, scale=scale, dtype=dtype)
