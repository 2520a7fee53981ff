"""Conversion between fp32 masters and fp8 params, on whole params.

The scale is the least power of two that brings the whole master's greatest magnitude (amax) into
the format's range. It is at least 2**-126, and the format's maximum times the scale stays within
fp32. If amax is zero or not finite, the scale is 1. Values out of range saturate at the format's
maximum, with their sign.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zero_sim.workloads.fp8 import FP8_DTYPES, SCALE_SUFFIX

# The least normal fp32 number.
_SCALE_MIN = 2.0**-126


def find_scales(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's fp8 scales by param; 0-D fp32, live."""
    return {
        name: module.get_buffer(name + SCALE_SUFFIX)
        for name, param in module.named_parameters()
        if param.dtype in FP8_DTYPES
    }


def decode(values: Tensor, *, scale: Tensor) -> Tensor:
    """Decode an fp8 tensor with its 0-D fp32 scale into a new fp32 tensor."""
    return values.detach().float() * scale


def encode(master: Tensor, *, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Encode an fp32 master as fp8 with a 0-D fp32 scale."""
    # Saturate, because the conversion gives NaN or infinity for values out of range.
    greatest = torch.finfo(dtype).max
    return (master / scale).clamp(min=-greatest, max=greatest).to(dtype)


def scale_for(master: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Return the 0-D fp32 scale for a whole fp32 master."""
    # Over the whole master. A sharded system reduces this over ranks.
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
    """Working dtypes and fp8 scales."""

    dtypes: Mapping[str, torch.dtype]
    """Working dtype by param."""
    scales: Mapping[str, Tensor]
    """fp8 scales before the step, by param."""

    def cast(self, name: str, master: Tensor, *, is_stepped: bool) -> Tensor:
        """Return the working param for an fp32 master; a stepped fp8 param gets a new scale."""
        dtype = self.dtypes[name]
        # Other dtypes need no scale.
        if name not in self.scales:
            return master.to(dtype)
        scale = scale_for(master, dtype=dtype) if is_stepped else self.scales[name]
        return encode(master, scale=scale, dtype=dtype)
