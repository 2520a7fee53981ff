"""Manner in which two tensors differ."""

import math

import pytest
import torch

from zero_sim.findings.describe import manner_of

EXPECTED = [1.0, 3.0, -5.0, 0.0, 7.25]


@pytest.mark.parametrize(
    ("got", "manner"),
    [
        ([1.0, 0.0, 0.0, 0.0, 7.25], "zeros"),
        ([1.0, 3.0, -5.0, 2.0, 7.25], "nonzeros"),
        ([-1.0, -3.0, 5.0, 0.0, 7.25], "sign"),
        ([1.0, 3.0, -5.0, 0.0, math.nextafter(7.25, 8)], "one-ulp"),
        ([0.25, 0.75, -1.25, 0.0, 1.8125], "smaller"),
        ([3.0, 9.0, -15.0, 0.0, 21.75], "larger"),
        ([2 / 3, 2.0, -10 / 3, 0.0, 7.25 * 2 / 3], "smaller"),
        ([3.0, 1.0, -5.0, 0.0, 7.25], "moved"),
        ([1.0, 3.5, -5.5, 0.0, 7.25], "values"),
        ([1.0, 3.0, math.inf, 0.0, 7.0], "nonfinite"),
        ([1.0, 3.0, math.nan, 0.0, 7.25], "nonfinite"),
    ],
)
def test_first_manner_that_applies_is_returned(got, manner):
    dtype = torch.float64
    assert manner_of(torch.tensor(EXPECTED, dtype=dtype), torch.tensor(got, dtype=dtype)) == manner


def test_factor_may_be_rounded():
    """A third in fp32, as for an average over three ranks instead of a sum."""
    expected = torch.linspace(-3, 7, 101)
    assert manner_of(expected, expected / 3) == "smaller"
    assert manner_of(expected.bfloat16(), (expected.bfloat16() / 3)) == "smaller"


@pytest.mark.parametrize(("got", "manner"), [(0.5, "smaller"), (3.0, "larger"), (0.7, "values")])
def test_single_element_needs_a_whole_factor(got, manner):
    assert manner_of(torch.tensor([1.0]), torch.tensor([got])) == manner


def test_finite_value_for_an_infinity():
    assert manner_of(torch.tensor([math.inf]), torch.tensor([1.0])) == "finite"


@pytest.mark.parametrize("other", [torch.zeros(3), torch.zeros(2, dtype=torch.float64)])
def test_another_shape_or_dtype_is_a_shape_difference(other):
    assert manner_of(torch.zeros(2), other) == "shape"


def test_counters_have_a_manner():
    assert manner_of(torch.tensor(2), torch.tensor(4)) == "larger"
    assert manner_of(torch.tensor(2), torch.tensor(3)) == "values"


def test_narrow_floats_have_a_manner():
    expected = torch.tensor([1.0, 2.0, 4.0]).to(torch.float8_e4m3fn)
    got = torch.tensor([1.0, 4.0, 8.0]).to(torch.float8_e4m3fn)
    assert manner_of(expected, got) == "larger"
