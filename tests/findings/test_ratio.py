"""Common factor of a difference, named only if the numbers prove it."""

import pytest
import torch

from zero_sim.findings.ratio import find_ratio, ratio_in_words

VALUES = torch.tensor([0.3, -1.7, 5.25, 1e-3, 0.0, 123.4, -0.0625])


def common_ratio(expected, got):
    return ratio_in_words(find_ratio(expected, got))


def quotient(values, count):
    """Divide as AVG does: in fp32, then rounded to the dtype."""
    return (values.float() / count).to(values.dtype)


class TestNamed:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("count", [3, 5, 7])
    def test_rounded_quotient_is_named(self, dtype, count):
        values = VALUES.to(dtype)
        said = common_ratio(values, quotient(values, count))
        assert said == f"every element is 1/{count} x the expected one, up to rounding"

    def test_average_of_an_fp32_sum_is_named(self):
        # Both are rounded to bf16 once, so neither is an exact multiple of the other.
        total = (torch.arange(200, dtype=torch.float32) * 0.37 + 0.11).sin()
        said = common_ratio(total.bfloat16(), (total / 3).bfloat16())
        assert said == "every element is 1/3 x the expected one, up to rounding"

    @pytest.mark.parametrize(("factor", "shown"), [(0.25, "1/4"), (4.0, "4"), (-1.0, "-1")])
    def test_factor_without_rounding_is_named(self, factor, shown):
        said = common_ratio(VALUES, VALUES * factor)
        assert said == f"every element is {shown} x the expected one"

    def test_rounded_multiple_is_named(self):
        assert "is 3 x the expected one" in common_ratio(VALUES, VALUES * 3)

    def test_subnormal_numbers_are_named(self):
        tiny = torch.tensor([7, 11, 1000, 3], dtype=torch.int32).view(torch.float32)
        assert "1/3 x" in common_ratio(tiny, tiny / 3)


class TestNotNamed:
    """Differences without a proven factor."""

    def test_element_off_by_more_than_its_rounding(self):
        got = quotient(VALUES, 3)
        got[2] = got[2] * (1 + 4 * torch.finfo(torch.float32).eps)
        assert common_ratio(VALUES, got) == ""

    def test_zero_that_became_nonzero(self):
        got = VALUES / 4
        got[4] = 1e-9
        assert common_ratio(VALUES, got) == ""

    def test_two_factors_that_fit(self):
        # With eight bits, 1/300 and 1/301 of one number round to the same.
        one = torch.tensor([1.0], dtype=torch.bfloat16)
        assert common_ratio(one, quotient(one, 300)) == ""

    def test_less_than_a_rounding(self):
        assert common_ratio(VALUES, torch.nextafter(VALUES, VALUES * 2)) == ""

    @pytest.mark.parametrize("got", [torch.zeros(7), VALUES * 0.4, VALUES * float("nan")])
    def test_no_common_factor(self, got):
        assert common_ratio(VALUES, got) == ""

    def test_factor_too_large_for_a_whole_number(self):
        assert common_ratio(torch.tensor([1e-30]), torch.tensor([1e30])) == ""

    def test_integers_have_no_factor(self):
        assert common_ratio(torch.tensor([3, 6]), torch.tensor([1, 2])) == ""
