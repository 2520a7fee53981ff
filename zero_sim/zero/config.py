"""How the ZeRO engine is configured: one frozen record that all its layers read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from zero_sim.errors import UsageError
from zero_sim.layout import ParamOrder

Stage = Literal[0, 1]
Divide = Literal["none", "pre", "post"]
GradDtype = Literal["param", "fp32"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroConfig:
    """Stage, numerics and layout of one engine; the same on every rank.

    Raises:
        UsageError: If a field has no such value. Sizes are checked when the layout is planned.
    """

    stage: Stage = 1
    """0: every rank keeps all optimizer state (plain data parallelism); 1: each keeps a shard."""
    divide: Divide = "post"
    """How the sum over ranks becomes a mean: not at all; each rank divides before the sum, in the
    gradient's dtype; or the sum is divided in fp32 after it."""
    grad_dtype: GradDtype = "param"
    """Dtype in which gradients are accumulated and summed: the param's own, or fp32."""
    bucket_elems: int | None = None
    """A bucket closes once it holds at least this many elements; None for one bucket a buffer."""
    align_elems: int = 1
    """Every shard starts at a multiple of this many elements."""
    param_order: ParamOrder = "registration"
    """Order of params in a buffer."""
    broadcast_params: bool = True
    """Whether group rank 0's params and module buffers replace all others' at construction; where
    False, the caller vouches that every rank built the same bits."""

    def __post_init__(self) -> None:
        for name, choices in (("stage", Stage), ("divide", Divide), ("grad_dtype", GradDtype)):
            value = getattr(self, name)
            if isinstance(value, bool) or value not in get_args(choices):
                expected = ", ".join(map(repr, get_args(choices)))
                raise UsageError(f"Expected {name} to be one of {expected} but got {value!r}.")
