"""Byte spans of several buffers that share one arena."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from zero_sim.layout.integers import round_up
from zero_sim.layout.span import Span

PLACE_BYTES = 512
"""Span alignment in bytes. torch's CUDA allocator rounds requests to the same multiple."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArenaPlan:
    """Byte size of an arena, and a span for each buffer in order of use."""

    size: int
    places: tuple[Span, ...]


def plan_arena(sizes: Sequence[int], *, at_a_time: int | None) -> ArenaPlan:
    """Return the shortest arena for buffers that are used in turn.

    Args:
        sizes: Buffer sizes in bytes, in order of use.
        at_a_time: Number of consecutive buffers in memory together: 1, 2, or None for all.
    """
    rounded = [round_up(size, PLACE_BYTES) for size in sizes]
    if at_a_time is None:
        # All at once, so nothing is reused.
        starts = [*accumulate(rounded, initial=0)]
        size = starts[-1]
    else:
        # With 2, even turns sit at the start and odd turns at the end. Neighbours never overlap,
        # because the arena is as long as the largest pair.
        pairs = [a + b for a, b in pairwise(rounded)] if at_a_time > 1 else []
        size = max([*rounded, *pairs], default=0)
        starts = [size - own if turn % 2 else 0 for turn, own in enumerate(rounded)]
    return ArenaPlan(
        size=size,
        # Spans have the buffer's own length; only their starts are aligned.
        # Not strict, because `accumulate` also returns the last buffer's end.
        places=tuple(Span(start, start + own) for start, own in zip(starts, sizes, strict=False)),
    )
