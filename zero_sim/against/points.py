"""Points at which tensors of a script are observed, and the share that one rank has of one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Moment = Literal[
    "forward",
    "evaluation",
    "backward",
    "gradient",
    "setting",
    "state",
    "param",
    "saved",
    "loaded",
    "end",
]
MOMENTS: dict[Moment, str] = {
    "forward": "param as forward used it",
    "evaluation": "param as a forward without gradients used it",
    "backward": "gradient after the last backward",
    "gradient": "gradient at Optimizer.step",
    "setting": "setting at Optimizer.step",
    "state": "optimizer state after the step",
    "param": "param after the step",
    "saved": "tensor of a checkpoint that was saved",
    "loaded": "tensor of a checkpoint that was loaded",
    "end": "tensor at the end of the script",
}
"""Moments within a step in the order in which a fault passes through them."""
LOCALISING: frozenset[Moment] = frozenset({"backward", "gradient", "setting"})
"""Moments that only show where a difference came from: scaled gradients may be a convention."""
END_STEP = 1 << 30
"""The step of what is observed after the script's last line."""


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as in `float32`."""
    return str(dtype).removeprefix("torch.")


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Tensors among values, and those in lists and tuples."""
    for each in values:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from tensors_in(each)


class Point(NamedTuple):
    """One observation of one tensor, the same on all ranks and in all runs."""

    step: int
    """Calls of `Optimizer.step` before it on its rank, or `END_STEP`."""
    moment: Moment
    name: str

    @property
    def order(self) -> tuple[int, int]:
        """Sorts points by the time at which a fault would reach them."""
        return self.step, _ORDER[self.moment]

    @property
    def when(self) -> str:
        """Step and moment in words."""
        when = "the end" if self.step == END_STEP else f"step {self.step + 1}"
        return f"{when}, {MOMENTS[self.moment]}"

    @property
    def text(self) -> str:
        """The point in words."""
        return f"{self.when}: {self.name}"


_ORDER = {moment: index for index, moment in enumerate(MOMENTS)}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Piece:
    """What one rank has of a tensor."""

    values: Tensor
    """float64, the rank's own elements."""
    shape: tuple[int, ...]
    """Shape of the whole tensor if the rank knows it, else of its own elements."""
    shards: tuple[tuple[int, int, int], ...] = ()
    """For each mesh dimension that shards the tensor, from the outermost: the tensor dimension,
    this rank's coordinate, and the number of ranks. Empty for a tensor that is not sharded."""
    is_partial: bool = False
    """True for a DTensor whose ranks hold addends of its values."""
    is_flat: bool = False
    """True if the shards are consecutive parts of the flattened tensor, perhaps with padding."""
    is_buffer: bool = False
    """True for a buffer of a module, which may be a rank's own, such as a running mean."""
    dtype: str = "float32"
    """The script's dtype."""


class Sink:
    """Receives the observations of ranks; this one keeps nothing."""

    def wants(self, point: Point) -> bool:
        """True if a point is worth a copy."""
        return False

    def forget(self) -> None:
        """Forget all, because the run begins anew."""

    def take(self, rank: int, point: Point, piece: Piece) -> None:
        """Receive one rank's piece, whose values change after the call."""
