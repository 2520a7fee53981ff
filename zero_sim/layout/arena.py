"""Byte spans of several buffers that share one arena."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from zero_sim.layout.integers import round_up
from zero_sim.layout.span import Span

PLACE_BYTES = 512
"""Alignment in bytes of every span. torch's CUDA allocator rounds requests to the same multiple."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArenaPlan:
    """An arena, in bytes."""

    size: int
    places: tuple[Span, ...]


def plan_arena(sizes: Sequence[int], *, at_a_time: int | None) -> ArenaPlan:
    """Return the shortest arena for buffers that are needed one after another, and their spans.

    Args:
        sizes: Bytes of each buffer, in order of use.
        at_a_time: Largest number of consecutive buffers in memory together: 1, 2, or None for all.
    """
    rounded = [round_up(size, PLACE_BYTES) for size in sizes]
    if at_a_time is None:
        # All at once: one after the other, nothing is reused.
        starts = [*accumulate(rounded, initial=0)]
        size = starts[-1]
    else:
        # With 2, odd buffers sit at the end and even ones at the start. Neighbours then never
        # overlap if the arena is as long as the largest pair.
        pairs = [a + b for a, b in pairwise(rounded)] if at_a_time > 1 else []
        size = max([*rounded, *pairs], default=0)
        starts = [size - own if turn % 2 else 0 for turn, own in enumerate(rounded)]
    return ArenaPlan(
        size=size,
        # Only starts are aligned; each span has the buffer's own length.
        # Not strict, because `accumulate` also returns the end of the last buffer.
        places=tuple(Span(start, start + own) for start, own in zip(starts, sizes, strict=False)),
    )
