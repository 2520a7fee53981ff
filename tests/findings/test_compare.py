"""Equality of tensors, and the description of a difference."""

import math

import pytest
import torch

from zero_sim.findings.compare import SPANS_MAX, find_difference, same_bits

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e5m2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_signed_zeros_are_equal_and_nans_are_equal(dtype):
    a = torch.tensor([0.0, -0.0, math.nan, 1.0], dtype=dtype)
    b = torch.tensor([-0.0, 0.0, math.nan, 1.0], dtype=dtype)
    assert same_bits(a, b)
    assert find_difference(a, b) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_ulp_is_a_difference(dtype):
    a = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=dtype)
    b = a.clone()
    b[1, 0] = (
        torch.nextafter(a[1, 0].double(), torch.tensor(9.0).double())
        if dtype == torch.float64
        else (
            a[1, 0].reshape(1).view({1: torch.int8, 2: torch.int16, 4: torch.int32}[a.itemsize]) + 1
        ).view(dtype)[0]
    )
    difference = find_difference(a, b)
    assert difference is not None
    assert (difference.first, difference.ulp) == (2, 1)
    assert (difference.differ_count, difference.compared_count) == (1, 4)


def test_ulp_counts_across_zero():
    tiny = torch.tensor([2.0**-149])
    difference = find_difference(tiny, -tiny)
    assert difference is not None
    assert difference.ulp == 2


def test_nan_against_a_number_has_no_distance():
    difference = find_difference(torch.tensor([1.0]), torch.tensor([math.nan]))
    assert difference is not None
    assert difference.ulp is None


def test_integers_compare_exactly():
    assert same_bits(torch.tensor([1, 2]), torch.tensor([1, 2]))
    difference = find_difference(torch.tensor([1, 2]), torch.tensor([1, 3]))
    assert difference is not None
    assert (difference.first, difference.expected, difference.got) == (1, 2, 3)


def test_difference_within_allclose_is_a_difference():
    a = torch.full((1000,), 1.0)
    b = a.clone()
    b[999] = 1.0 + 2.0**-23
    assert torch.allclose(a, b)
    assert not same_bits(a, b)


def test_fp8_value_is_printed_with_its_byte():
    from zero_sim.findings import describe as findings

    a = torch.tensor([1.0, 24.0]).to(torch.float8_e5m2)
    b = torch.tensor([1.0, 28.0]).to(torch.float8_e5m2)
    found = findings.differing(findings.param(0, 0, "w"), a, b)
    assert (found.expected, found.got) == (
        "0x1.8000000000000p+4 = byte 0x4e",
        "0x1.c000000000000p+4 = byte 0x4f",
    )
    assert (found.expected_value, found.got_value, found.ulp) == ("24.0", "28.0", 1)


def test_difference_has_the_spans_that_differ():
    expected = torch.zeros(12)
    got = expected.clone()
    got[[0, 1, 5, 11]] = 1
    assert find_difference(expected, got).spans == ((0, 2), (5, 6), (11, 12))


def test_spans_are_limited_to_the_first_ones():
    expected = torch.zeros(1000)
    got = expected.clone()
    got[1::2] = 1
    spans = find_difference(expected, got).spans
    assert spans == tuple((i, i + 1) for i in range(1, 2 * SPANS_MAX, 2))
