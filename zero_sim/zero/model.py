"""A module's trained params, and the conversion between masters and working params."""

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
"""Trainable param dtypes, with their names in a layout."""


class PlainCast:
    """Working params that are masters cast to the param's dtype."""

    dtype_names: ClassVar[Mapping[torch.dtype, str]] = DTYPE_NAMES
    """Trainable param dtypes, with their names in a layout."""

    @classmethod
    def build(
        cls,
        module: nn.Module,
        *,
        params: Mapping[str, nn.Parameter],
        holders: Holders,
    ) -> PlainCast:
        """Return the cast for a model.

        Args:
            module: The whole model.
            params: Its trainable params, by name.
            holders: The ranks that hold each kind of params.
        """
        return cls()

    def read(self, param: nn.Parameter, working: Tensor) -> Tensor:
        """Return the weights for a part of a working param."""
        return working

    def write_(self, param: nn.Parameter, working: Tensor, master: Tensor) -> None:
        """Write a master to its part of a working param, rounded to the param dtype."""
        # copy_ rounds to nearest even, as torch's casts do.
        working.copy_(master)

    def prepare(self, masters: Callable[[], Iterable[tuple[nn.Parameter, Tensor]]]) -> None:
        """Prepare to write masters. Every rank calls it, even if it owns nothing."""


def find_trainable_params(
    module: nn.Module, *, dtypes: Collection[torch.dtype] = DTYPE_NAMES
) -> dict[str, nn.Parameter]:
    """Return the params with `requires_grad`, by name, in registration order.

    A tied param appears once, under its first name.

    Args:
        module: The whole model.
        dtypes: Trainable dtypes.

    Raises:
        ModelError: If the params cannot be trained; see `check_params`.
    """
    # named_parameters() returns a tied param only once.
    params = dict(module.named_parameters())
    check_params(params, of=type(module).__name__, dtypes=dtypes)
    return {name: param for name, param in params.items() if param.requires_grad}


def find_grad_dtype(params: Mapping[str, nn.Parameter]) -> torch.dtype:
    """Return the dtype of autograd's gradients for the params in a buffer.

    Raises:
        ModelError: If these dtypes differ.
    """
    # param.grad_dtype, which fp8 params need, overrides the default: the param's own dtype.
    by_dtype = {param.grad_dtype or param.dtype: name for name, param in params.items()}
    if len(by_dtype) > 1:
        found = ", ".join(f"{dtype} of {name!r}" for dtype, name in by_dtype.items())
        raise ModelError(
            f"expected one dtype for the gradients of all params in a buffer, got "
            f"{found}. Set the same param.grad_dtype for all, or grad_dtype='fp32'."
        )
    return next(iter(by_dtype))
