"""Points at which tensors of a script are observed, and one rank's piece of a tensor."""

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
"""Moments of a step, in the order in which a fault passes through them, with a description."""
LOCALISING: frozenset[Moment] = frozenset({"backward", "gradient", "setting"})
"""Moments that locate a difference but do not prove one: scaled gradients may be a convention."""
END_STEP = 1 << 30
"""Step number of observations after the script's last line."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name, such as `float32`."""
    return str(dtype).removeprefix("torch.")


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among values, and in lists and tuples of these."""
    for each in values:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from tensors_in(each)


class Point(NamedTuple):
    """An observation of a tensor, identical on all ranks and in all runs."""

    step: int
    """Calls of `Optimizer.step` on the rank before it, or `END_STEP`."""
    moment: Moment
    name: str

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: the time at which a fault would reach the point."""
        return self.step, _ORDER[self.moment]

    @property
    def when(self) -> str:
        """Description of step and moment."""
        when = "the end" if self.step == END_STEP else f"step {self.step + 1}"
        return f"{when}, {MOMENTS[self.moment]}"

    @property
    def text(self) -> str:
        """Description of the point."""
        return f"{self.when}: {self.name}"


_ORDER = {moment: index for index, moment in enumerate(MOMENTS)}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Piece:
    """One rank's part of a tensor."""

    values: Tensor
    """The rank's own elements, in float64."""
    shape: tuple[int, ...]
    """Shape of the whole tensor if the rank knows it, otherwise of its own elements."""
    shards: tuple[tuple[int, int, int], ...] = ()
    """For each mesh dimension that shards the tensor, from the outermost: the tensor dimension,
    this rank's coordinate, and the number of ranks. Empty for an unsharded tensor."""
    is_partial: bool = False
    """True for a DTensor with a Partial placement, whose values are sums over ranks."""
    is_flat: bool = False
    """True if the shards are consecutive parts of the flattened tensor, perhaps with padding."""
    is_buffer: bool = False
    """True for a module's buffer, which may differ by rank, as a running mean does."""
    dtype: str = "float32"
    """Native dtype."""


class Sink:
    """Receiver of the observations of ranks. This base class keeps none."""

    def wants(self, point: Point) -> bool:
        """Return True if a point should be observed."""
        return False

    def forget(self) -> None:
        """Forget all observations, because the run starts again."""

    def take(self, rank: int, point: Point, piece: Piece) -> None:
        """Receive one rank's piece, whose memory changes after the call."""
