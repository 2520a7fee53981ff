"""Params of one byte per element: fp8 values times one scale per param.

[Note: fp8 params]
A param `X` with dtype `float8_e4m3fn` or `float8_e5m2` represents the weight `X * X_scale`.
`X_scale` is a 0D fp32 buffer in the module that owns `X`, so it is moved, copied and saved with the
module. The param's gradient is taken with respect to this product. Autograd casts a leaf's gradient
to `leaf.grad_dtype`, which defaults to fp8. So the module must set it to fp32, bf16 or fp16, and
again after a `deepcopy`, which drops it.

[Note: current scaling]
After the masters were stepped, all ranks agree on `amax`, the largest magnitude in the whole
master. The new scale is the smallest power of two that keeps `amax / scale` within fp8. It is
limited so that the largest fp8 value and the scale itself stay finite and normal in fp32. It is 1
if amax is zero, infinite or NaN. A value is `master / scale`, clamped to finite fp8 numbers and
rounded to nearest, ties to even; NaN stays NaN. Scaling by a power of two does not round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_sim.errors import ModelError
from zero_sim.zero.collectives import all_reduce_max
from zero_sim.zero.groups import Holders
from zero_sim.zero.model import PlainCast

DTYPE_NAMES: Final = {torch.float8_e4m3fn: "fp8-e4m3", torch.float8_e5m2: "fp8-e5m2"}
"""Trainable fp8 dtypes, with their names in a layout."""

_GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The largest numbers, 448 and 57344, are both 0.875 times a power of two.
_MAX_MANTISSA = 0.875
_MAX_EXPONENT = {torch.float8_e4m3fn: 9, torch.float8_e5m2: 16}
_FP32_EXPONENTS = (-126, 128)  # smallest normal number; first number too large
_FP32_BIAS, _FP32_MANTISSA_BITS = 127, 23


def find_scale(module: nn.Module, *, name: str, param: nn.Parameter) -> Tensor:
    """Return an fp8 param's scale, a module buffer; see [Note: fp8 params].

    Args:
        module: The whole model.
        name: The param's name in it.
        param: The param.

    Returns:
        0D fp32.

    Raises:
        ModelError: If the scale is missing or unusable, if modules share the param but not the
            scale, or if the param's gradient would be fp8.
    """
    # By identity: modules that share the param must share the buffer too, not only its value.
    scales = {id(scale): scale for scale in _find_candidates(module, param)}
    scale = next(iter(scales.values()))
    if len(scales) > 1:
        raise ModelError(
            f"expected one scale for {name!r} in all modules that share it, got {len(scales)}. "
            f"Share the buffer like the param."
        )
    if scale is None or scale.shape != () or scale.dtype is not torch.float32:
        got = "none" if scale is None else f"shape {tuple(scale.shape)} of {scale.dtype}"
        raise ModelError(
            f"expected a 0D fp32 buffer '{name}_scale', saved with the module, for the param "
            f"{name!r} of {param.dtype}, got {got}. "
            f"Call register_buffer('{name.rpartition('.')[2]}_scale', torch.ones(()))."
        )
    if not (scale.isfinite() and scale > 0):
        raise ModelError(
            f"expected a positive, finite scale of {name!r}, got {scale.item()}. "
            f"Set it to torch.ones(())."
        )
    if param.grad_dtype not in _GRAD_DTYPES:
        raise ModelError(
            f"expected a gradient of fp32, bf16 or fp16 for {name!r} of {param.dtype}, got "
            f"grad_dtype={param.grad_dtype}. Set param.grad_dtype = torch.bfloat16."
        )
    return scale


def _find_candidates(module: nn.Module, param: nn.Parameter) -> Iterator[Tensor | None]:
    """Yield the scale for each of the param's names; None if missing or not saved."""
    for owner in module.modules():
        buffers = dict(owner.named_buffers(recurse=False))
        for name, member in owner.named_parameters(recurse=False, remove_duplicate=False):
            if member is param:
                # A checkpoint without the scale would make the values meaningless.
                saved = f"{name}_scale" not in owner._non_persistent_buffers_set
                yield buffers.get(f"{name}_scale") if saved else None


def dequantize(values: Tensor, *, scale: Tensor) -> Tensor:
    """Return fp8 values as fp32 weights.

    Args:
        values: fp8, any shape.
        scale: 0D fp32.
    """
    return values.to(torch.float32) * scale


def quantize_(values: Tensor, master: Tensor, *, scale: Tensor) -> None:
    """Write masters as fp8 values; see [Note: current scaling].

    Args:
        values: fp8, in the master's shape.
        master: fp32.
        scale: 0D fp32.
    """
    # Clamp first, because casts overflow differently: e5m2 gives infinity, and e4m3 gives NaN or
    # the largest number, depending on the torch version.
    bound = torch.finfo(values.dtype).max
    values.copy_((master / scale).clamp_(-bound, bound))


class Fp8Cast(PlainCast):
    """Conversion from masters to working params that may be fp8; see [Note: current scaling].

    Args:
        scales: Scale of each fp8 param, a 0D fp32 module buffer.
        kinds: Kind of each fp8 param.
        holders: The ranks that hold each kind.
    """

    dtype_names = MappingProxyType({**PlainCast.dtype_names, **DTYPE_NAMES})

    def __init__(
        self,
        scales: Mapping[nn.Parameter, Tensor],
        *,
        kinds: Mapping[nn.Parameter, str],
        holders: Holders,
    ) -> None:
        self.scales = scales
        self._kinds = kinds
        self._holders = holders
        self._updates: list[ScaleUpdate] | None = None

    @classmethod
    def build(
        cls,
        module: nn.Module,
        *,
        params: Mapping[str, nn.Parameter],
        holders: Holders,
    ) -> Fp8Cast:
        """Return the cast for a model, with the model's scales.

        Raises:
            ModelError: See `find_scale`.
        """
        names = {p: name for name, p in params.items() if p.dtype in DTYPE_NAMES}
        scales = {param: find_scale(module, name=names[param], param=param) for param in names}
        kinds = {param: holders.kinds[name] for param, name in names.items()}
        return cls(scales, kinds=kinds, holders=holders)

    def read(self, param: nn.Parameter, working: Tensor) -> Tensor:
        """Return the weights for a part of a working param; in fp32 for fp8 params."""
        scale = self.scales.get(param)
        return working if scale is None else dequantize(working, scale=scale)

    def write_(self, param: nn.Parameter, working: Tensor, master: Tensor) -> None:
        """Write a master to its part of a working param; fp8 params use the current scale."""
        scale = self.scales.get(param)
        if scale is None:
            working.copy_(master)
        else:
            quantize_(working, master, scale=scale)

    def prepare(self, masters: Callable[[], Iterable[tuple[nn.Parameter, Tensor]]]) -> None:
        """Compute new scales for all fp8 params, with one collective per kind."""
        # An update for each kind, because experts have another shard group.
        if self._updates is None:
            by_kind: dict[str, dict[nn.Parameter, Tensor]] = {}
            for param, scale in self.scales.items():
                by_kind.setdefault(self._kinds[param], {})[param] = scale
            self._updates = [
                ScaleUpdate(scales, group=self._holders.owners_of(kind))
                for kind, scales in by_kind.items()
            ]
        for update in self._updates:
            update.run(masters())


class ScaleUpdate:
    """Computes new scales for all fp8 params of one kind, with one collective per step.

    Args:
        scales: 0D fp32, by param, in the same order on all ranks.
        group: The ranks that share the masters; None if every rank holds all.
    """

    def __init__(
        self, scales: Mapping[nn.Parameter, Tensor], *, group: dist.ProcessGroup | None
    ) -> None:
        self._scales = scales
        self._group = group
        self._index_of = {param: index for index, param in enumerate(scales)}

    @torch.no_grad()
    def run(self, masters: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
        """Set the scale of every param that is not frozen. Every rank calls it.

        Args:
            masters: This rank's parts of the masters, fp32, not empty. Params without a scale are
                ignored.
        """
        if not self._scales:
            return
        first = next(iter(self._scales.values()))
        # [params], fp32; 0, neutral in the maximum, for params without elements on this rank.
        amax = first.new_zeros(len(self._scales))
        for param, master in masters:
            index = self._index_of.get(param)
            if index is not None:
                amax[index] = measure_amax(master)
        if self._group is not None:
            all_reduce_max(amax, group=self._group)
        # A frozen param keeps its values, so it keeps its scale.
        for param, scale in self._scales.items():
            if param.requires_grad:
                # In place, because the scale is a module buffer.
                scale.copy_(choose_scale(amax[self._index_of[param]], dtype=param.dtype))


def measure_amax(master: Tensor) -> Tensor:
    """Return the largest magnitude in a non-empty master, 0D; infinity for NaN."""
    # Backends disagree on the maximum of NaN and a number, so send infinity instead.
    return master.abs().amax().nan_to_num_(nan=torch.inf, posinf=torch.inf)


def choose_scale(amax: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Return the scale for a largest magnitude; see [Note: current scaling].

    Args:
        amax: 0D fp32.
        dtype: The fp8 dtype.

    Returns:
        0D fp32.
    """
    # amax = mantissa * 2**exponent, with 0.5 <= mantissa < 1. Add 1 to the exponent if amax / scale
    # would still exceed 0.875 * 2**_MAX_EXPONENT.
    mantissa, exponent = torch.frexp(amax)
    exponent = exponent - _MAX_EXPONENT[dtype] + (mantissa > _MAX_MANTISSA)
    least, beyond = _FP32_EXPONENTS
    exponent = exponent.clamp(least, beyond - _MAX_EXPONENT[dtype])
    # Set the bits directly: pow() and exp2() do not guarantee exact powers of two.
    power = ((exponent + _FP32_BIAS) << _FP32_MANTISSA_BITS).to(torch.int32).view(torch.float32)
    return torch.where((amax > 0) & amax.isfinite(), power, torch.ones_like(power))
