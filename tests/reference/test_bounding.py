"""Bounds of sums over all trees of additions, and trees that come close to them."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zero_sim.reference.bounding import bound_sum, divide_ends, known_sum, reach_of

BF16, HALF, FP32 = torch.bfloat16, torch.float16, torch.float32
FINER = {BF16: [BF16, FP32, torch.float64], HALF: [HALF, FP32, torch.float64]}
FINER[FP32] = [FP32, torch.float64]


def finer_than(dtype):
    """Return the dtypes in which a sum of this dtype may be kept."""
    return FINER[dtype]


def sum_in_a_tree(terms, draw):
    """Add 0-D tensors in random pairs and precisions, with some sums rounded to the dtype.

    Args:
        terms: Of equal dtype.
        draw: A `random.Random`.
    """
    dtype, nodes = terms[0].dtype, list(terms)
    while len(nodes) > 1:
        one = nodes.pop(draw.randrange(len(nodes)))
        other = nodes.pop(draw.randrange(len(nodes)))
        fits = [d for d in finer_than(dtype) if d.itemsize >= max(one.itemsize, other.itemsize)]
        chosen = draw.choice(fits)
        total = one.to(chosen) + other.to(chosen)
        nodes.append(total.to(dtype) if draw.random() < 0.5 else total)
    return nodes[0].to(dtype)


def exactly(terms):
    return sum((Fraction(float(term)) for term in terms), Fraction(0))


@st.composite
def sums(draw):
    """Draw terms of a dtype: of equal or mixed size, cancelling, near underflow."""
    dtype = draw(st.sampled_from([BF16, HALF, FP32]))
    limits = torch.finfo(dtype)
    scale = draw(st.sampled_from([1.0, limits.tiny, limits.tiny * limits.eps * 4]))
    wide = draw(st.sampled_from([0, 3, 12]))
    size = draw(st.integers(2, 12))
    numbers = st.tuples(st.floats(-1, 1, width=32), st.integers(-wide, wide))
    values = [a * 2.0**b * scale for a, b in draw(st.lists(numbers, min_size=size, max_size=size))]
    if draw(st.booleans()):
        values += [-value for value in values[1:]]
    return torch.tensor(values, dtype=torch.float64).to(dtype)


@given(terms=sums(), seed=st.integers(0, 2**32))
def test_every_tree_is_within_the_bound(terms, seed):
    bound = bound_sum(list(terms.reshape(-1, 1)))
    low, high = Fraction(float(bound.low)), Fraction(float(bound.high))
    assert low <= exactly(terms) <= high
    draw = random.Random(seed)
    for _ in range(20):
        got = Fraction(float(sum_in_a_tree(list(terms), draw)))
        assert low <= got <= high


@given(terms=sums())
def test_bound_equals_that_of_the_theorem(terms):
    """The bound is as narrow as exact rational arithmetic gives, except for roundings of fp64."""
    bound, limits = bound_sum(list(terms.reshape(-1, 1))), torch.finfo(terms.dtype)
    count, unit = len(terms), Fraction(limits.eps) / 2
    stretched = (1 + unit) ** (count - 1)
    magnitudes = sum((abs(Fraction(float(term))) for term in terms), Fraction(0))
    lost = (count - 1) * stretched * Fraction(limits.tiny) * Fraction(limits.eps)
    radius = (stretched - 1) * magnitudes + lost
    if not bound.certified.item():
        room = magnitudes * Fraction(1, 2**46)
        assert 2 * radius <= Fraction(float(bound.high)) - Fraction(float(bound.low))
        assert Fraction(float(bound.high)) - Fraction(float(bound.low)) <= 2 * (radius + room)


@pytest.mark.parametrize("count", [3, 5, 9, 33])
@pytest.mark.parametrize("dtype", [BF16, HALF, FP32], ids=str)
def test_chain_of_upward_roundings_comes_close(dtype, count):
    """Each further term is slightly more than half of the last bit, so each sum is rounded up."""
    half = torch.finfo(dtype).eps / 2
    small = torch.tensor(half * (1 + 4 * half), dtype=torch.float64).to(dtype)
    terms = [torch.ones((), dtype=dtype), *[small] * (count - 1)]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    bound = bound_sum([term.reshape(1) for term in terms])
    off = abs(float(total) - float(exactly(terms)))
    assert off > 0.4 * float((bound.high - bound.low) / 2)


def test_bound_of_certified_elements_is_one_number():
    terms = [torch.tensor([1.0, 1.0], dtype=BF16), torch.tensor([2.0, 2.0**-9], dtype=BF16)]
    bound = bound_sum([*terms, torch.tensor([4.0, 4.0], dtype=BF16)])
    assert bound.certified.tolist() == [True, False]
    assert bound.low[0] == bound.high[0] == 7
    assert bound.low[1] < bound.high[1]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_nonfinite_terms_leave_the_bound_open(bad):
    bound = bound_sum([torch.tensor([1.0, bad]), torch.tensor([2.0, 1.0]), torch.ones(2)])
    assert bound.nonfinite.tolist() == bound.open.tolist() == [False, True]
    assert bound.holds(torch.tensor([4.0, math.nan])).all()


def test_possible_overflow_leaves_the_bound_open():
    """The sum overflows in one order and not in another."""
    large = torch.tensor([torch.finfo(FP32).max])
    bound = bound_sum([large, large, -large])
    assert bound.open.all()
    assert not bound.nonfinite.any()
    assert bound.low == -math.inf
    assert bound.high == math.inf


def test_nan_is_outside_every_bound():
    bound = bound_sum([torch.ones(1)] * 3)
    assert not bound.holds(torch.tensor([math.nan])).any()


def test_bound_of_a_known_order_is_its_sum():
    terms = [torch.tensor([0.1, 0.3], dtype=BF16), torch.tensor([0.7, 0.1], dtype=BF16)]
    bound = known_sum(terms[0] + terms[1], terms)
    assert torch.equal(bound.low, (terms[0] + terms[1]).double())
    assert torch.equal(bound.low, bound.high)


def test_reach_is_rounded_up():
    exact = (1 + Fraction(1, 256)) ** 5 - 1
    got = Fraction(reach_of(6, dtype=BF16))
    assert exact <= got <= exact * (1 + Fraction(1, 2**50))


@given(
    value=st.floats(-(2.0**100), 2.0**100, width=32),
    spread=st.floats(0, 1),
    divisors=st.lists(st.sampled_from([3.0, 7.0, 1024.0, 12.0]), max_size=2),
)
def test_division_keeps_values_between_the_ends(value, spread, divisors):
    got = torch.tensor([value])
    width = abs(value) * spread
    low, high = divide_ends(got.double() - width, got.double() + width, divisors=divisors)
    for divisor in divisors:
        got = got / torch.tensor(divisor)
    assert low <= got.double() <= high
