"""Trained params of a module, and how their values are stored."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import ClassVar, Final

import torch
from torch import Tensor, nn

from zero_sim.errors import ModelError
from zero_sim.zero.groups import Holders
from zero_sim.zero.refusals import check_params

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
    check_params(params, of=type(module).__name__, dtypes=dtypes)
    return {name: param for name, param in params.items() if param.requires_grad}


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
