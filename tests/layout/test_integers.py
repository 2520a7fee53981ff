"""Integer division with explicit rounding."""

from __future__ import annotations

import pytest

from zero_sim.errors import LayoutError
from zero_sim.layout import ceil_div, round_up


class TestCeilDiv:
    """ceil_div, which rounds up without a float."""

    @pytest.mark.parametrize(
        ("value", "divisor", "expected"), [(0, 3, 0), (1, 3, 1), (3, 3, 1), (4, 3, 2)]
    )
    def test_rounds_up(self, value, divisor, expected):
        assert ceil_div(value, divisor) == expected

    def test_is_exact_beyond_a_float(self):
        assert ceil_div(2**53 + 1, 1) == 2**53 + 1

    @pytest.mark.parametrize(("value", "divisor"), [(-1, 2), (1, 0), (1, -2)])
    def test_refuses_invalid_sizes(self, value, divisor):
        with pytest.raises(LayoutError, match="at least"):
            ceil_div(value, divisor)


class TestRoundUp:
    """round_up, which returns the next multiple."""

    @pytest.mark.parametrize(("value", "expected"), [(0, 0), (1, 4), (4, 4), (5, 8)])
    def test_goes_to_the_next_multiple(self, value, expected):
        assert round_up(value, 4) == expected
