"""Certified sums, equal in every tree of additions, by a tight bound."""

from __future__ import annotations

import math

import pytest
import torch

from zero_sim.reference.certificate import certify, unit_exponents

BF16 = torch.bfloat16


def terms_of(*rows, dtype=BF16):
    """Return a 1D tensor per row."""
    return [torch.tensor(row, dtype=dtype) for row in rows]


def sums_in_all_trees(terms):
    """Yield the sum of the terms for every tree of additions."""
    if len(terms) == 1:
        yield terms[0]
    for i in range(len(terms)):
        for j in range(i):
            rest = [term for k, term in enumerate(terms) if k not in (i, j)]
            yield from sums_in_all_trees([terms[i] + terms[j], *rest])


@pytest.mark.parametrize("seed", range(5))
def test_certified_elements_have_one_sum_in_all_trees(seed):
    generator = torch.Generator().manual_seed(seed)
    terms = [
        (torch.randint(-90, 91, (400,), generator=generator) * 2.0**-7).to(BF16) for _ in range(5)
    ]
    certified = certify(terms)
    sums = torch.stack(list(sums_in_all_trees(terms)))
    same = (sums == sums[0]).all(dim=0)
    assert certified.any()
    assert not certified.all()
    assert same[certified].all()
    # The test is not vacuous, because some elements differ, and none of these is certified.
    assert not same.all()


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (([256.0], [1.0]), False),
        (([255.0], [1.0]), True),
        (([256.0], [-256.0]), True),
        (([256.0], [-1.0]), True),
        (([256.0], [1.0], [1.0]), False),
        (([-255.0], [-2.0]), False),
        (([1.0], [2.0**-7]), True),
        (([1.0], [2.0**-8]), False),
        (([0.0], [0.0]), True),
        (([0.0], [3.140625]), True),
        (([2.0**-100], [2.0**-93]), True),
    ],
)
def test_certificate_is_tight(rows, expected):
    """256 is 2^8: one more unit, and some order rounds."""
    assert certify(terms_of(*rows)).tolist() == [expected]


def test_certificate_depends_on_dtype_precision():
    """fp32 has 24 bits."""
    rows = ([2.0**24 - 1], [1.0], [-5.0])
    assert certify(terms_of(*rows, dtype=torch.float32)).tolist() == [True]
    assert certify(terms_of([2.0**24], [1.0], dtype=torch.float32)).tolist() == [False]


def test_nonfinite_terms_are_not_certified():
    """Neither is a sum that may overflow on the way."""
    rows = ([math.nan, math.inf, 3.3895e38, 1.0], [1.0, 1.0, 3.3895e38, 1.0])
    assert certify(terms_of(*rows)).tolist() == [False, False, False, True]


def test_scalar_and_empty_shapes_are_kept():
    assert certify([torch.ones(())]).shape == ()
    assert certify([torch.ones(2, 0)]).shape == (2, 0)


def test_unit_exponent_of_a_number():
    """It is the lowest bit set."""
    values = torch.tensor([1.0, 3.0, 12.0, -0.625, 2.0**-149], dtype=torch.float64)
    assert unit_exponents(values).tolist() == [0, 0, 2, -3, -149]
