"""Drawing: every value once, the same ones for a seed."""

from itertools import islice

import pytest
from hypothesis import strategies as st

from zero_sim.fuzz.choices import Drawable
from zero_sim.fuzz.drawing import draws
from zero_sim.fuzz.strategies import drawn_cases

NUMBERS = Drawable(lambda choices: choices.integer(0, 10**6))


def drawn(values_from, count, *, seed="0"):
    return list(islice(draws(values_from, seed=seed), count))


def test_no_scenario_comes_twice():
    cases = drawn(drawn_cases(), 300)
    assert len(set(cases)) == len(cases) == 300


def test_most_scenarios_have_a_random_seed_of_their_own():
    seeds = [case.run.seed for case in drawn(drawn_cases(), 200)]
    assert len(set(seeds)) > 150


def test_the_simplest_comes_first_and_once():
    assert drawn(NUMBERS, 100)[0] == 0
    assert drawn(NUMBERS, 100).count(0) == 1


def test_a_seed_decides_all_and_a_longer_series_begins_with_a_shorter_one():
    assert drawn(NUMBERS, 40)[:25] == drawn(NUMBERS, 25)
    assert drawn(NUMBERS, 25, seed="1") != drawn(NUMBERS, 25)


FEW = Drawable(lambda choices: choices.among("abcde"))


def test_with_few_values_it_ends_after_them():
    assert drawn(FEW, 100)[0] == "a"
    assert sorted(drawn(FEW, 100)) == list("abcde")
    assert drawn(FEW.filter(lambda letter: False), 100) == []


def test_all_choices_come_up_and_no_others():
    numbers = Drawable(lambda choices: (choices.integer(3, 5), choices.integer(0, 10**9)))
    assert {number for number, _ in drawn(numbers, 100)} == {3, 4, 5}


def test_a_strategy_of_somebody_else_is_drawn_from_among_other_choices():
    either = Drawable(lambda choices: (choices.integer(0, 10**6), choices.of(st.text("ab"))))
    assert len({text for _, text in drawn(either, 50)}) > 3
    assert drawn(either, 50) == drawn(either, 50)
    assert drawn(Drawable(lambda choices: choices.of(st.nothing())), 50) == []


def test_what_a_strategy_of_somebody_else_raises_is_raised():
    broken = Drawable(lambda choices: choices.of(st.integers().map(lambda number: 1 // 0)))
    with pytest.raises(ZeroDivisionError):
        drawn(broken, 10)


def test_the_simplest_can_be_left_out_where_others_have_it():
    first = next(iter(draws(NUMBERS, seed="0")))
    others = islice(draws(NUMBERS, seed="0", simplest=False), 1)
    assert list(others) != [first]
