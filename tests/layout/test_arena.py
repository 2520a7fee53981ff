"""Places in an arena: neighbours never overlap, and it is no longer than they need."""

from itertools import pairwise

import pytest

from zero_sim.layout import Span, plan_arena

SIZES = [3 * 512, 5 * 512, 4 * 512 - 7, 1, 9 * 512, 0, 2 * 512]


def test_neighbours_do_not_overlap():
    plan = plan_arena(SIZES, at_a_time=2)
    for first, second in pairwise(plan.places):
        assert first.intersect(second).empty


def test_it_is_as_long_as_the_longest_two_in_a_row():
    assert plan_arena(SIZES, at_a_time=2).size == 10 * 512


def test_alone_they_need_what_the_longest_needs():
    assert plan_arena(SIZES, at_a_time=1).size == 9 * 512


def test_what_stays_has_a_stretch_each():
    plan = plan_arena(SIZES, at_a_time=None)
    assert plan.size == sum(-(-size // 512) * 512 for size in SIZES)
    assert all(first.stop <= second.start for first, second in pairwise(plan.places))


@pytest.mark.parametrize("at_a_time", [None, 1, 2])
def test_every_place_lies_inside_and_begins_where_any_dtype_may(at_a_time):
    plan = plan_arena(SIZES, at_a_time=at_a_time)
    for place, size in zip(plan.places, SIZES, strict=True):
        assert place.numel == size
        assert place.start % 512 == 0
        assert Span(0, plan.size).contains(place)


def test_of_nothing_it_is_nothing():
    assert plan_arena([], at_a_time=2).size == 0
