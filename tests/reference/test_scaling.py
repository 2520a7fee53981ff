"""The loss scale, and factors of means."""

from __future__ import annotations

import pytest
import torch

from zero_sim.errors import UsageError
from zero_sim.reference.scaling import LossFactors, LossRows, LossScale, loss_factor
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
    """Two steps; then the count starts again."""
    assert scales([True] * 5, initial=4.0, interval=2) == [4, 4, 8, 8, 16]


def test_overflow_halves_and_resets_the_count():
    """The good step before it is forgotten."""
    assert scales([True, False, True, True, True], initial=4.0, interval=2) == [4, 4, 2, 2, 4]


def test_never_below_one():
    assert scales([False] * 4, initial=4.0, interval=2) == [4, 2, 1, 1]


AT = LossRows(rows=2, rank_rows=5, step_rows=12, micro_batches=2, world_size=3, cp=3)


@pytest.mark.parametrize(
    ("rule", "factor"),
    [
        ("micro-batches", 1 / 2),
        ("tokens", 3 / 12),
        ("cp", 3),
        ("1/cp", 1 / 3),
        (lambda at: at.rows / at.rank_rows, 2 / 5),
    ],
)
def test_loss_factor_follows_the_rule(rule, factor):
    assert loss_factor(rule, AT) == factor


@pytest.mark.parametrize("bad", [None, True, float("nan"), "0.5"])
def test_factor_must_be_a_finite_number(bad):
    """The message names the function."""
    with pytest.raises(UsageError, match=r"Numerics\.scale_loss to return a finite number"):
        loss_factor(lambda at: bad, AT)


def test_bad_factor_of_the_second_loss_names_its_field():
    with pytest.raises(UsageError, match=r"Numerics\.scale_second to return a finite number"):
        loss_factor(lambda at: None, AT, declared="scale_second")


TERMS = (torch.tensor(3.0), torch.tensor(5.0))


@pytest.mark.parametrize(
    ("terms", "factors", "scaled"),
    [
        (TERMS, LossFactors(main=2.0), 16.0),
        (TERMS, LossFactors(main=2.0, second=4.0), 26.0),
        (TERMS[:1], LossFactors(main=2.0, second=4.0), 6.0),
    ],
)
def test_each_loss_term_has_a_factor(terms, factors, scaled):
    """The second term uses the main factor if it has none of its own."""
    assert float(factors.scaled(terms)) == scaled
