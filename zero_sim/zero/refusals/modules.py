"""Refusals of modules whose params cannot be put into buffers."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from zero_sim.errors import ModelError


def check_params(
    params: Mapping[str, nn.Parameter], *, of: str, dtypes: Collection[torch.dtype]
) -> None:
    """Refuse params that cannot be trained.

    Args:
        params: All of a module, by name.
        of: Class of the module, as errors name it.
        dtypes: Dtypes that can be trained.

    Raises:
        ModelError: If none is trainable; if params lie on two devices or share memory; if one has a
            dtype or layout that cannot be trained, is not materialized, or is already wrapped.
    """
    for name, param in params.items():
        if is_lazy(param) or param.is_meta:
            raise ModelError(
                f"expected params with values, got {name!r}, which has none yet. "
                f"Try a forward pass (lazy modules) or to_empty() (meta device) first."
            )
    trainable = {name: param for name, param in params.items() if param.requires_grad}
    if not trainable:
        raise ModelError(
            f"expected at least one trainable param, got {of} with "
            f"{len(params)} params, all frozen. Try requires_grad_(True) on what is to be trained."
        )
    _check_one_device(params)
    for name, param in trainable.items():
        _check_trainable(name, param, dtypes)
    _check_no_shared_memory(params)


def _check_one_device(params: Mapping[str, nn.Parameter]) -> None:
    first_name, first = next(iter(params.items()))
    for name, param in params.items():
        if param.device != first.device:
            raise ModelError(
                f"expected all params on one device, got {first_name!r} on {first.device} and "
                f"{name!r} on {param.device}. Try module.to({str(first.device)!r})."
            )


def _check_trainable(name: str, param: nn.Parameter, dtypes: Collection[torch.dtype]) -> None:
    if param.layout is not torch.strided:
        raise ModelError(
            f"expected dense params, got {name!r} with layout {param.layout}. Try to_dense()."
        )
    if param.dtype not in dtypes:
        expected = ", ".join(map(str, dtypes))
        raise ModelError(
            f"expected params of {expected}, got {name!r} of {param.dtype}. "
            f"Try module.to(torch.float32), or freeze the param."
        )
    if hasattr(param, "main_grad"):
        raise ModelError(
            f"expected a module that is not wrapped yet, got {name!r} with a main_grad. "
            f"Its hooks would count every gradient twice; try a fresh module."
        )


def _check_no_shared_memory(params: Mapping[str, nn.Parameter]) -> None:
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
