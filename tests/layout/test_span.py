"""Half-open spans."""

from __future__ import annotations

import pytest

from zero_sim.errors import LayoutError
from zero_sim.layout import Span


class TestSpan:
    """Span, a half-open range of elements."""

    def test_counts_its_elements(self):
        assert Span(3, 7).numel == 4

    def test_empty(self):
        assert (Span(3, 3).empty, Span(3, 4).empty) == (True, False)

    @pytest.mark.parametrize(("start", "stop"), [(4, 3), (-1, 2)])
    def test_refuses_backward_and_negative_ranges(self, start, stop):
        with pytest.raises(LayoutError, match="0 <= start <= stop"):
            Span(start, stop)

    def test_contains_elements_half_open(self):
        assert [element for element in range(6) if Span(2, 4).contains(element)] == [2, 3]

    def test_contains_spans(self):
        """A span contains itself and an empty span at either end, but none that extends beyond."""
        outer = Span(2, 4)
        assert outer.contains(outer)
        assert outer.contains(Span(4, 4))
        assert not outer.contains(Span(3, 5))

    @pytest.mark.parametrize(
        ("other", "expected"),
        [(Span(0, 9), Span(2, 6)), (Span(4, 9), Span(4, 6)), (Span(0, 3), Span(2, 3))],
    )
    def test_intersects(self, other, expected):
        assert Span(2, 6).intersect(other) == expected

    @pytest.mark.parametrize("other", [Span(0, 1), Span(6, 8), Span(7, 9), Span(3, 3)])
    def test_intersection_with_a_disjoint_span_is_empty(self, other):
        assert Span(2, 6).intersect(other).empty

    def test_shifts_both_ways(self):
        assert Span(2, 6).shift(3).shift(-5) == Span(0, 4)

    def test_prints_half_open(self):
        assert str(Span(2, 6)) == "[2, 6)"
