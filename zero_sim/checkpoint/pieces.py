"""Pieces: which rank writes which elements, and where each is read again. Integers only.

Nothing here knows of buffers, buckets or shards: a piece of a checkpoint is a param's name and a
span of its elements in logical order, which mean the same in every layout.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from zero_sim.errors import CheckpointError
from zero_sim.layout import Span


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Where a stored piece meets a wanted span."""

    piece: int
    """Index of the piece."""
    in_piece: Span
    """Elements counted from the start of the piece."""
    in_wanted: Span
    """Elements counted from the start of what is wanted."""


def find_cover_problems(
    numels: Mapping[str, int], spans: Mapping[str, Sequence[Span]]
) -> list[str]:
    """Return what keeps spans from holding every element of every param exactly once.

    Args:
        numels: Number of elements of every param.
        spans: What there is of every param, in any order; empty spans do not count.
    """
    problems = [f"{name!r} is not a param" for name in sorted(spans.keys() - numels.keys())]
    for name, numel in numels.items():
        reached = 0
        present = (span for span in spans.get(name, ()) if not span.empty)
        for span in sorted(present, key=lambda span: (span.start, span.stop)):
            if span.start > reached:
                problems.append(f"{name!r}: nothing holds {Span(reached, span.start)}")
            elif span.start < reached:
                problems.append(f"{name!r}: two hold {Span(span.start, min(reached, span.stop))}")
            reached = max(reached, span.stop)
        if reached > numel:
            problems.append(f"{name!r}: {Span(numel, reached)} lies past its {numel} elements")
        elif reached < numel:
            problems.append(f"{name!r}: nothing holds {Span(reached, numel)}")
    return problems


def assign_writers(
    numels: Mapping[str, int], owned: Sequence[Sequence[tuple[str, Span]]]
) -> list[list[int]]:
    """Choose for every piece the lowest rank that owns it.

    With redundancy, or without sharding, several ranks own the same span; one of them writes it.

    Args:
        numels: Number of elements of every param.
        owned: The pieces of every rank.

    Returns:
        For every rank the indices of the pieces that it writes.

    Raises:
        CheckpointError: If what the ranks own is not every element exactly once, copies aside.
    """
    taken: set[tuple[str, Span]] = set()
    chosen: list[list[int]] = []
    for pieces in owned:
        mine = [index for index, piece in enumerate(pieces) if piece not in taken]
        taken.update(pieces[index] for index in mine)
        chosen.append(mine)
    spans: dict[str, list[Span]] = {}
    for name, span in taken:
        spans.setdefault(name, []).append(span)
    problems = find_cover_problems(numels, spans)
    if problems:
        raise CheckpointError(
            "expected the ranks to own every element once, got " + "; ".join(problems) + "."
        )
    return chosen


class PieceIndex:
    """The pieces of one tensor in order, to be searched by span.

    Args:
        spans: Disjoint; in any order.
    """

    def __init__(self, spans: Iterable[Span]) -> None:
        pieces = ((span, index) for index, span in enumerate(spans) if not span.empty)
        self._pieces = sorted(pieces, key=lambda piece: piece[0].start)
        self._starts = [span.start for span, _ in self._pieces]

    def find(self, wanted: Span) -> list[Part]:
        """Return the parts of pieces that make up a span, in order."""
        parts: list[Part] = []
        first = max(0, bisect_right(self._starts, wanted.start) - 1)
        for span, index in self._pieces[first:]:
            if span.start >= wanted.stop:
                break
            common = span.intersect(wanted)
            if not common.empty:
                parts.append(
                    Part(
                        piece=index,
                        in_piece=common.shift(-span.start),
                        in_wanted=common.shift(-wanted.start),
                    )
                )
        return parts
