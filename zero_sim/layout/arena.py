"""Places of several things in one arena: which stretch each has whenever it is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from zero_sim.layout.integers import round_up
from zero_sim.layout.span import Span

PLACE_BYTES = 512
"""Every place begins at a multiple of it, as what torch's allocator for CUDA gives does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArenaPlan:
    """An arena, in bytes."""

    size: int
    places: tuple[Span, ...]


def plan_arena(sizes: Sequence[int], *, at_a_time: int | None) -> ArenaPlan:
    """Return the shortest arena for things that come one behind the other, and their places.

    Args:
        sizes: Bytes of each, in the order in which they come.
        at_a_time: How many are there at the same time at most: 1, or 2 neighbours, or all of them
            where None.
    """
    rounded = [round_up(size, PLACE_BYTES) for size in sizes]
    if at_a_time is None:
        starts = [*accumulate(rounded, initial=0)]
        size = starts[-1]
    else:
        pairs = [a + b for a, b in pairwise(rounded)] if at_a_time > 1 else []
        size = max([*rounded, *pairs], default=0)
        starts = [size - own if turn % 2 else 0 for turn, own in enumerate(rounded)]
    return ArenaPlan(
        size=size,
        places=tuple(Span(start, start + own) for start, own in zip(starts, sizes, strict=False)),
    )
