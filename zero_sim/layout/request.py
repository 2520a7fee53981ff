"""Inputs of a layout: the params, and the policy that places them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from zero_sim.errors import LayoutError
from zero_sim.layout.partition import PartitionRule

ParamOrder = Literal["registration", "reverse"]

_DTYPE_BYTES = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2, "fp8-e4m3": 1, "fp8-e5m2": 1}
"""Element size by dtype name; needed only if a policy aligns to bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamSpec:
    """The properties of a param that its layout depends on.

    Raises:
        LayoutError: If a dimension is negative or not an integer.
    """

    name: str
    """Unique in the model."""
    shape: tuple[int, ...]
    """`()` is a single element; a zero anywhere makes the param empty."""
    dtype: str
    """Dtype name, such as `bf16`. Only compared, unless the policy aligns to bytes."""
    kind: str = "dense"
    """Kind, such as `dense` or `expert`; it selects the ranks that hold the param. Only compared
    here."""
    group: int = 0
    """Param group, if groups have separate buffers. Only compared here."""

    def __post_init__(self) -> None:
        # Check here, because a wrong shape would only show up later, as a wrong offset.
        if not all(_is_count(dim) for dim in self.shape):
            raise LayoutError(
                f"expected a shape of integers of at least 0, got shape={self.shape!r} "
                f"for param {self.name!r}."
            )

    @property
    def numel(self) -> int:
        """Number of elements."""
        # The empty product is 1: a scalar has one element.
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutPolicy:
    """Rules for placing params into buffers, buckets and shards.

    Raises:
        LayoutError: If a field is out of range.
    """

    shard_count: int = 1
    """Number of shards per bucket, which is the size of the shard group."""
    align_elems: int = 1
    """Alignment of shard starts, in elements."""
    align_bytes: int = 1
    """Alignment of shard starts, in bytes of the working param. Applies in addition."""
    bucket_elems: int | None = None
    """A bucket closes once it has at least this many elements. None for one bucket per buffer."""
    param_order: ParamOrder = "registration"
    """Param order in a buffer. `reverse` approximates backward's gradient order."""
    partition: PartitionRule = "padded"
    """Rule that cuts buckets into shards; see `zero_sim.layout.partition`. `rows` requires
    `bucket_elems=1`."""

    def __post_init__(self) -> None:
        _check_at_least_one("shard_count", self.shard_count)
        _check_at_least_one("align_elems", self.align_elems)
        _check_at_least_one("align_bytes", self.align_bytes)
        if self.bucket_elems is not None:
            _check_at_least_one("bucket_elems", self.bucket_elems)
        _check_choice("param_order", self.param_order, get_args(ParamOrder))
        _check_choice("partition", self.partition, get_args(PartitionRule))
        # Padding aligns shards, and only `padded` allows any amount of it.
        if self.partition != "padded" and (self.align_elems > 1 or self.align_bytes > 1):
            raise LayoutError(
                f"expected no alignment with partition={self.partition!r}, because alignment needs "
                f"padding, got align_elems={self.align_elems}, align_bytes={self.align_bytes}. "
                f"Remove the alignment, or use partition='padded'."
            )
        # If a bucket had two params, their rows could differ in length.
        if self.partition == "rows" and self.bucket_elems != 1:
            raise LayoutError(
                f"expected bucket_elems=1 with partition='rows', because each param is cut alone, "
                f"got bucket_elems={self.bucket_elems}. Set bucket_elems=1."
            )

    def shard_multiple(self, dtype: str) -> int:
        """Return the number of elements that must divide every shard length, for a dtype.

        This is the least common multiple of both alignments. A start is aligned to `align_bytes` if
        and only if it is a multiple of `align_bytes / gcd(align_bytes, element size)` elements.

        Raises:
            LayoutError: If the policy aligns to bytes and the size of the dtype is unknown.
        """
        if self.align_bytes == 1:
            # Do not look up the dtype, because any name is valid if bytes do not matter.
            return self.align_elems
        elem_bytes = _DTYPE_BYTES.get(dtype)
        if elem_bytes is None:
            raise LayoutError(
                f"expected a dtype of known size for align_bytes={self.align_bytes}, got "
                f"dtype={dtype!r}. Try one of {', '.join(_DTYPE_BYTES)}, or align_elems."
            )
        in_elems = self.align_bytes // math.gcd(self.align_bytes, elem_bytes)
        return math.lcm(self.align_elems, in_elems)


def _is_count(value: object) -> bool:
    # bool is an int in Python, but `True` as a size is a mistake.
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_at_least_one(name: str, value: object) -> None:
    if not _is_count(value) or value == 0:
        raise LayoutError(
            f"expected {name} to be an integer of at least 1, got {name}={value!r} "
            f"(type={type(value).__name__})."
        )


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise LayoutError(
            f"expected {name} to be one of {', '.join(choices)}, got {name}={value!r}."
        )
