"""Points at which a script's tensors are observed, and a rank's piece of a tensor."""

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
"""Moments with descriptions, in the order in which a fault passes through them."""
LOCALISING: frozenset[Moment] = frozenset({"backward", "gradient", "setting"})
"""Moments that locate a difference but do not prove it, because a script may scale gradients."""
END_STEP = 1 << 30
"""Step number for observations after the script's last line."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name, such as `float32`."""
    return str(dtype).removeprefix("torch.")


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors in values, lists and tuples."""
    for each in values:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from tensors_in(each)


class Point(NamedTuple):
    """Key of an observed tensor, identical on all ranks and in all runs."""

    step: int
    """Earlier calls of `Optimizer.step` on this rank, or `END_STEP`."""
    moment: Moment
    name: str

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: when a fault would reach the point."""
        return self.step, _ORDER[self.moment]

    @property
    def when(self) -> str:
        """Step and moment, in words."""
        when = "the end" if self.step == END_STEP else f"step {self.step + 1}"
        return f"{when}, {MOMENTS[self.moment]}"

    @property
    def text(self) -> str:
        """The point, in words."""
        return f"{self.when}: {self.name}"


_ORDER = {moment: index for index, moment in enumerate(MOMENTS)}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Piece:
    """One rank's part of a tensor."""

    values: Tensor
    """This rank's elements, in float64."""
    shape: tuple[int, ...]
    """Shape of the unsharded tensor if the rank knows it, otherwise of its own elements."""
    shards: tuple[tuple[int, int, int], ...] = ()
    """Tensor dimension, this rank's coordinate and number of ranks, for each mesh dimension that
    shards the tensor, outermost first. Empty for an unsharded tensor."""
    is_partial: bool = False
    """True for a DTensor with a Partial placement, whose values still need a sum over ranks."""
    is_flat: bool = False
    """True if shards are consecutive parts of the flattened tensor, perhaps with padding."""
    is_buffer: bool = False
    """True for a module's buffer. Buffers may differ by rank, as running means do."""
    dtype: str = "float32"
    """Native dtype."""


class Sink:
    """Receiver of observations. This base class drops them."""

    def wants(self, point: Point) -> bool:
        """Return True to observe a point."""
        return False

    def forget(self) -> None:
        """Forget all observations, because the run starts again."""

    def take(self, rank: int, point: Point, piece: Piece) -> None:
        """Receive a rank's piece. Copy it to keep it, because its memory changes after the call."""
