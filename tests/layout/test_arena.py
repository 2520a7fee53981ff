"""Positions in an arena: neighbors never overlap, and the arena is as short as possible."""

from itertools import pairwise

import pytest

from zero_sim.layout import Span, plan_arena

SIZES = [3 * 512, 5 * 512, 4 * 512 - 7, 1, 9 * 512, 0, 2 * 512]


def test_neighbors_do_not_overlap():
    plan = plan_arena(SIZES, at_a_time=2)
    for first, second in pairwise(plan.places):
        assert first.intersect(second).empty


@pytest.mark.parametrize(
    ("sizes", "at_a_time", "size"),
    [(SIZES, 2, 10 * 512), (SIZES, 1, 9 * 512), ([], 2, 0)],
    ids=["longest two in a row", "longest alone", "nothing"],
)
def test_size_is_the_largest_sum_at_a_time(sizes, at_a_time, size):
    assert plan_arena(sizes, at_a_time=at_a_time).size == size


def test_without_reuse_every_gradient_has_its_own_span():
    plan = plan_arena(SIZES, at_a_time=None)
    assert plan.size == sum(-(-size // 512) * 512 for size in SIZES)
    assert all(first.stop <= second.start for first, second in pairwise(plan.places))


@pytest.mark.parametrize("at_a_time", [None, 1, 2])
def test_positions_are_inside_and_aligned(at_a_time):
    plan = plan_arena(SIZES, at_a_time=at_a_time)
    for place, size in zip(plan.places, SIZES, strict=True):
        assert place.numel == size
        assert place.start % 512 == 0
        assert Span(0, plan.size).contains(place)
