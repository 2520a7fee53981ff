"""Pieces: the elements that each rank writes, and their positions when read. Integers only.

A piece is a param name and a span of elements in logical order. It does not depend on buffers,
buckets or shards, so it means the same in every layout.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from zero_sim.errors import CheckpointError
from zero_sim.layout import Span


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Intersection of a stored piece with a requested span."""

    piece: int
    """Index of the piece."""
    in_piece: Span
    """Offsets from the piece's start."""
    in_wanted: Span
    """Offsets from the requested span's start."""


def find_cover_problems(
    numels: Mapping[str, int], spans: Mapping[str, Sequence[Span]]
) -> list[str]:
    """Return elements that spans do not contain exactly once.

    The spans may have any order. Empty spans are ignored.
    """
    problems = [f"{name!r} is not a param" for name in sorted(spans.keys() - numels.keys())]
    for name, numel in numels.items():
        reached = 0
        # Empty spans have no position, so they neither overlap nor cover.
        present = (span for span in spans.get(name, ()) if not span.empty)
        # In order of start, each span must begin where earlier spans end.
        for span in sorted(present, key=lambda span: (span.start, span.stop)):
            if span.start > reached:
                problems.append(f"{name!r}: no span contains {Span(reached, span.start)}")
            elif span.start < reached:
                problems.append(
                    f"{name!r}: two contain {Span(span.start, min(reached, span.stop))}"
                )
            reached = max(reached, span.stop)
        if reached > numel:
            problems.append(f"{name!r}: {Span(numel, reached)} is past its {numel} elements")
        elif reached < numel:
            problems.append(f"{name!r}: no span contains {Span(reached, numel)}")
    return problems


def assign_writers(
    numels: Mapping[str, int], owned: Sequence[Sequence[tuple[str, Span]]]
) -> list[list[int]]:
    """Choose the lowest rank that owns a piece as its writer.

    Returns:
        For each rank, the indices of pieces it writes.

    Raises:
        CheckpointError: If the ranks do not own every element exactly once, replicas aside.
    """
    # With redundancy, or without sharding, several ranks own equal pieces: replicas.
    taken: set[tuple[str, Span]] = set()
    chosen: list[list[int]] = []
    for pieces in owned:
        mine = [index for index, piece in enumerate(pieces) if piece not in taken]
        taken.update(pieces[index] for index in mine)
        chosen.append(mine)
    spans: dict[str, list[Span]] = {}
    for name, span in taken:
        # Equal spans are merged by now, so any other overlap is an error of the layout.
        spans.setdefault(name, []).append(span)
    problems = find_cover_problems(numels, spans)
    if problems:
        raise CheckpointError(
            "expected the ranks to own every element once, got " + "; ".join(problems) + "."
        )
    return chosen


class PieceIndex:
    """Pieces of a tensor, as disjoint spans, sorted for search."""

    def __init__(self, spans: Iterable[Span]) -> None:
        pieces = ((span, index) for index, span in enumerate(spans) if not span.empty)
        self._pieces = sorted(pieces, key=lambda piece: piece[0].start)
        self._starts = [span.start for span, _ in self._pieces]

    def find(self, wanted: Span) -> list[Part]:
        """Return the piece parts that make up a span, in order."""
        parts: list[Part] = []
        # The last piece that starts before the span may reach into it.
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
