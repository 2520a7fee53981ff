"""The loss scale."""

from __future__ import annotations

from zero_sim.reference.scaling import LossScale
from zero_sim.scenario.spec import LossScaleSpec


def scales(outcomes, *, initial, interval):
    """Return the scale before each step."""
    scale = LossScale(LossScaleSpec(initial=initial, growth_interval=interval))
    seen = []
    for finite in outcomes:
        seen.append(scale.scale)
        scale.update(finite=finite)
    return seen


def test_doubles_after_good_steps_in_a_row():
    """Two of them; then counting starts anew."""
    assert scales([True] * 5, initial=4.0, interval=2) == [4, 4, 8, 8, 16]


def test_an_overflow_halves_and_counts_anew():
    """The good step before it is forgotten."""
    assert scales([True, False, True, True, True], initial=4.0, interval=2) == [4, 4, 2, 2, 4]


def test_never_below_one():
    """However often it overflows."""
    assert scales([False] * 4, initial=4.0, interval=2) == [4, 2, 1, 1]
