"""Assignment of writers to spans, and of pieces to reads, in integers."""

from __future__ import annotations

import pytest

from zero_sim.checkpoint.pieces import PieceIndex, assign_writers, find_cover_problems
from zero_sim.errors import CheckpointError
from zero_sim.layout import Span


class TestCover:
    """Spans cover every element exactly once."""

    @pytest.mark.parametrize(
        "spans", [[Span(0, 5)], [Span(3, 5), Span(0, 3)], [Span(0, 2), Span(2, 2), Span(2, 5)]]
    )
    def test_complete_cover_has_no_problems(self, spans):
        """In any order, with empty spans between."""
        assert find_cover_problems({"w": 5}, {"w": spans}) == []

    def test_empty_param_needs_no_span(self):
        assert find_cover_problems({"w": 0}, {}) == []

    @pytest.mark.parametrize(
        ("spans", "problem"),
        [
            ([], "no span contains [0, 5)"),
            ([Span(1, 5)], "no span contains [0, 1)"),
            ([Span(0, 2), Span(3, 5)], "no span contains [2, 3)"),
            ([Span(0, 4)], "no span contains [4, 5)"),
            ([Span(0, 3), Span(2, 5)], "two contain [2, 3)"),
            ([Span(0, 5), Span(1, 2)], "two contain [1, 2)"),
            ([Span(0, 6)], "[5, 6) is past its 5 elements"),
        ],
    )
    def test_gap_overlap_and_excess_are_problems(self, spans, problem):
        assert find_cover_problems({"w": 5}, {"w": spans}) == [f"'w': {problem}"]

    def test_span_of_unknown_param_is_a_problem(self):
        assert find_cover_problems({}, {"w": [Span(0, 1)]}) == ["'w' is not a param"]


class TestWriters:
    """The lowest rank that owns a span writes it."""

    def test_replicas_are_written_once(self):
        """Two replicas of two shards, and a rank without any."""
        low, high = ("w", Span(0, 2)), ("w", Span(2, 3))
        owned = [[low], [high], [], [low], [high]]
        assert assign_writers({"w": 3}, owned) == [[0], [0], [], [], []]

    def test_gap_is_an_error(self):
        with pytest.raises(CheckpointError, match=r"no span contains \[2, 3\)"):
            assign_writers({"w": 3}, [[("w", Span(0, 2))]])

    def test_replicas_with_different_spans_are_an_error(self):
        with pytest.raises(CheckpointError, match="two contain"):
            assign_writers({"w": 3}, [[("w", Span(0, 3))], [("w", Span(0, 2))]])


class TestPieceIndex:
    """Pieces are joined to a wanted span."""

    @pytest.mark.parametrize("wanted", [Span(a, b) for a in range(11) for b in range(a, 11)])
    def test_each_element_comes_from_its_piece(self, wanted):
        """For every span of ten elements, in unsorted pieces, one of them empty."""
        spans = [Span(7, 10), Span(0, 3), Span(4, 4), Span(3, 4), Span(4, 7)]
        got = {}
        for part in PieceIndex(spans).find(wanted):
            assert part.in_piece.numel == part.in_wanted.numel > 0
            for i in range(part.in_piece.numel):
                source = spans[part.piece].start + part.in_piece.start + i
                got[wanted.start + part.in_wanted.start + i] = source
        assert got == {element: element for element in range(wanted.start, wanted.stop)}
