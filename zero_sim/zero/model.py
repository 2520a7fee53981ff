"""Params of a module that are trained, how their values are stored, and modules to refuse."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import ClassVar, Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from zero_sim.errors import ModelError
from zero_sim.zero.groups import Holders

DTYPE_NAMES: Final = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}
"""The dtypes of params that can be trained, with the names they have in a layout."""


class PlainCast:
    """Working params that are their masters, cast to the param's dtype."""

    dtype_names: ClassVar[Mapping[torch.dtype, str]] = DTYPE_NAMES
    """The dtypes of params that can be trained, with the names they have in a layout."""

    @classmethod
    def build(
        cls,
        module: nn.Module,
        *,
        params: Mapping[str, nn.Parameter],
        holders: Holders,
    ) -> PlainCast:
        """Return the cast of a model.

        Args:
            module: The whole model.
            params: Its trainable params, by name.
            holders: The ranks that hold each kind of them.
        """
        return cls()

    def read(self, param: nn.Parameter, working: Tensor) -> Tensor:
        """Return the weights that a part of a working param stands for."""
        return working

    def write_(self, param: nn.Parameter, working: Tensor, master: Tensor) -> None:
        """Write a master to its part of a working param."""
        working.copy_(master)

    def prepare(self, masters: Callable[[], Iterable[tuple[nn.Parameter, Tensor]]]) -> None:
        """Make ready to write masters; every rank calls it, owning any or not."""


def find_trainable_params(
    module: nn.Module, *, dtypes: Collection[torch.dtype] = DTYPE_NAMES
) -> dict[str, nn.Parameter]:
    """Return the params with `requires_grad`, by name, in registration order.

    A tied param is one param and comes once, under the first of its names.

    Args:
        module: The whole model.
        dtypes: Those that can be trained.

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
        _check_trainable(name, param, dtypes)
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


def find_grad_dtype(params: Mapping[str, nn.Parameter]) -> torch.dtype:
    """Return the dtype in which autograd gives the gradients of params of one buffer.

    Raises:
        ModelError: If it is not the same for all.
    """
    by_dtype = {param.grad_dtype or param.dtype: name for name, param in params.items()}
    if len(by_dtype) > 1:
        found = ", ".join(f"{dtype} of {name!r}" for dtype, name in by_dtype.items())
        raise ModelError(
            f"expected one dtype for the gradients of all params that share a buffer, got "
            f"{found}. Try the same param.grad_dtype for all, or grad_dtype='fp32'."
        )
    return next(iter(by_dtype))


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
