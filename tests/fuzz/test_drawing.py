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


def test_no_scenario_is_drawn_twice():
    cases = drawn(drawn_cases(), 300)
    assert len(set(cases)) == len(cases) == 300


def test_most_scenarios_have_their_own_seed():
    seeds = [case.run.seed for case in drawn(drawn_cases(), 200)]
    assert len(set(seeds)) > 150


def test_simplest_value_is_drawn_first_and_once():
    assert drawn(NUMBERS, 100)[0] == 0
    assert drawn(NUMBERS, 100).count(0) == 1


def test_seed_determines_draws_and_their_prefixes():
    assert drawn(NUMBERS, 40)[:25] == drawn(NUMBERS, 25)
    assert drawn(NUMBERS, 25, seed="1") != drawn(NUMBERS, 25)


FEW = Drawable(lambda choices: choices.among("abcde"))


def test_drawing_ends_after_all_of_few_values():
    assert drawn(FEW, 100)[0] == "a"
    assert sorted(drawn(FEW, 100)) == list("abcde")
    assert drawn(FEW.filter(lambda letter: False), 100) == []


def test_integers_cover_their_range():
    numbers = Drawable(lambda choices: (choices.integer(3, 5), choices.integer(0, 10**9)))
    assert {number for number, _ in drawn(numbers, 100)} == {3, 4, 5}


def test_hypothesis_strategy_can_be_drawn_from():
    either = Drawable(lambda choices: (choices.integer(0, 10**6), choices.of(st.text("ab"))))
    assert len({text for _, text in drawn(either, 50)}) > 3
    assert drawn(either, 50) == drawn(either, 50)
    assert drawn(Drawable(lambda choices: choices.of(st.nothing())), 50) == []


def test_exception_in_a_strategy_is_raised():
    broken = Drawable(lambda choices: choices.of(st.integers().map(lambda number: 1 // 0)))
    with pytest.raises(ZeroDivisionError):
        drawn(broken, 10)


def test_simplest_value_can_be_omitted():
    first = next(iter(draws(NUMBERS, seed="0")))
    others = islice(draws(NUMBERS, seed="0", simplest=False), 1)
    assert list(others) != [first]
