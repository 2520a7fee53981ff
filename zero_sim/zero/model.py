"""Params of a module that are trained, and modules that cannot be."""

from __future__ import annotations

from typing import Final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from zero_sim.errors import ModelError
from zero_sim.zero.variants import fp8

DTYPE_NAMES: Final = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    **fp8.DTYPE_NAMES,
}
"""The dtypes of params that can be trained, with the names they have in a layout."""


def find_trainable_params(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the params with `requires_grad`, by name, in registration order.

    A tied param is one param and comes once, under the first of its names.

    Raises:
        ModelError: If there is none; if params lie on two devices or share memory; if one has a
            dtype or layout that cannot be trained, is not materialized, or is already wrapped.
    """
    params = dict(module.named_parameters())
    for name, param in params.items():
        if is_lazy(param) or param.is_meta:
            raise ModelError(
                f"expected params with values, got {name!r}, which has none yet. "
                f"Try a forward pass (lazy modules) or to_empty() (meta device) first."
            )
    trainable = {name: param for name, param in params.items() if param.requires_grad}
    if not trainable:
        raise ModelError(
            f"expected at least one trainable param, got {type(module).__name__} with "
            f"{len(params)} params, all frozen. Try requires_grad_(True) on what is to be trained."
        )
    _check_one_device(params)
    for name, param in trainable.items():
        _check_trainable(name, param)
    _check_no_shared_memory(params)
    return trainable


def _check_one_device(params: dict[str, nn.Parameter]) -> None:
    first_name, first = next(iter(params.items()))
    for name, param in params.items():
        if param.device != first.device:
            raise ModelError(
                f"expected all params on one device, got {first_name!r} on {first.device} and "
                f"{name!r} on {param.device}. Try module.to({str(first.device)!r})."
            )


def _check_trainable(name: str, param: nn.Parameter) -> None:
    if param.layout is not torch.strided:
        raise ModelError(
            f"expected dense params, got {name!r} with layout {param.layout}. Try to_dense()."
        )
    if param.dtype not in DTYPE_NAMES:
        expected = ", ".join(map(str, DTYPE_NAMES))
        raise ModelError(
            f"expected params of {expected}, got {name!r} of {param.dtype}. "
            f"Try module.to(torch.float32), or freeze the param."
        )
    if hasattr(param, "main_grad"):
        raise ModelError(
            f"expected a module that is not wrapped yet, got {name!r} with a main_grad. "
            f"Its hooks would count every gradient twice; try a fresh module."
        )


def _check_no_shared_memory(params: dict[str, nn.Parameter]) -> None:
    """Refuse two params in one memory: a buffer would silently give each its own."""
    spans: list[tuple[int, int, str]] = []
    for name, param in params.items():
        if param.numel() == 0 or param.layout is not torch.strided:
            continue
        extent = 1 + sum(
            (dim - 1) * stride for dim, stride in zip(param.shape, param.stride(), strict=True)
        )
        start_bytes = param.data_ptr()
        spans.append((start_bytes, start_bytes + extent * param.element_size(), name))
    spans.sort()
    reach_bytes, reach_name = 0, ""
    for start_bytes, stop_bytes, name in spans:
        if start_bytes < reach_bytes:
            raise ModelError(
                f"expected params with memory of their own, got {reach_name!r} and {name!r}, "
                f"which overlap. Try one nn.Parameter for both, or clone() one of them."
            )
        reach_bytes, reach_name = stop_bytes, name
