"""What a layout is asked for: the params, and the policy that places them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from zero_sim.errors import LayoutError

ParamOrder = Literal["registration", "reverse"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamSpec:
    """One param as the layout sees it: a name and a number of elements of some kind and dtype.

    Raises:
        LayoutError: If a dimension is negative or not an integer.
    """

    name: str
    """Unique among all params of the model."""
    shape: tuple[int, ...]
    """Shape; `()` is one element, and a zero anywhere makes the param empty."""
    dtype: str
    """Name of the dtype, such as `bf16`; only ever compared."""
    kind: str = "dense"
    """Which ranks share the param, such as `dense` or `expert`; only ever compared."""

    def __post_init__(self) -> None:
        if not all(_is_count(dim) for dim in self.shape):
            raise LayoutError(
                f"Expected a shape of integers of at least 0 but got shape={self.shape!r} "
                f"for param {self.name!r}."
            )

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutPolicy:
    """How params are placed into buffers, buckets and shards.

    Raises:
        LayoutError: If a field is out of range.
    """

    shard_count: int
    """Number of even shards of every bucket: the size of the group that shards it."""
    align_elems: int = 1
    """Every shard starts at a multiple of this many elements."""
    bucket_elems: int | None = None
    """A bucket closes once it holds at least this many elements; None for one bucket a buffer."""
    param_order: ParamOrder = "registration"
    """Order of params in a buffer; `reverse` is roughly the order in which gradients come."""

    def __post_init__(self) -> None:
        _check_at_least_one("shard_count", self.shard_count)
        _check_at_least_one("align_elems", self.align_elems)
        if self.bucket_elems is not None:
            _check_at_least_one("bucket_elems", self.bucket_elems)
        if self.param_order not in get_args(ParamOrder):
            raise LayoutError(
                f"Expected param_order to be one of {', '.join(get_args(ParamOrder))} "
                f"but got param_order={self.param_order!r}."
            )


def _is_count(value: object) -> bool:
    # bool is an int to Python, but `True` as a size is a slip of the caller.
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_at_least_one(name: str, value: object) -> None:
    if not _is_count(value) or value == 0:
        raise LayoutError(
            f"Expected {name} to be an integer of at least 1 but got {name}={value!r} "
            f"(type={type(value).__name__})."
        )
