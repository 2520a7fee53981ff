"""Params with other start values: changed after the draw, or drawn differently."""

import math

import pytest
import torch

from zero_sim.findings.draws import FALSE_ALARM, is_changed_draw, neighbours_probability


def drawn(count, seed):
    return torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("count", [10, 1000, 100_000])
def test_slightly_changed_draw_is_recognized(count):
    assert is_changed_draw(drawn(count, 0), drawn(count, 0) * (1 + 1e-6))


@pytest.mark.parametrize("seed", range(1, 20))
def test_another_draw_is_not_a_changed_draw(seed):
    assert not is_changed_draw(drawn(1000, 0), drawn(1000, seed))


def test_narrow_draws_beside_equal_zeros_are_not_a_changed_draw():
    expected, got = (drawn(4096, seed).bfloat16().double().view(64, 64) for seed in (0, 1))
    expected[:8] = got[:8] = 0
    assert not is_changed_draw(expected, got)


def test_half_of_a_draw_beside_another_is_not_a_changed_draw():
    whole, half = drawn(64, 0), drawn(32, 0)
    assert not is_changed_draw(whole, torch.cat([half, drawn(32, 1)]))


def test_few_elements_prove_nothing():
    assert not is_changed_draw(drawn(6, 0), drawn(6, 0) * (1 + 1e-6))


def test_constant_is_not_a_draw():
    assert is_changed_draw(torch.ones(4), torch.full((4,), 2.0))


@pytest.mark.parametrize(("elems", "count"), [(3, 1), (3, 2), (3, 3), (4, 2)])
def test_bound_holds_for_all_pairings(elems, count):
    reached = [pairs >= count for pairs in neighbours(list(range(2 * elems)))]
    assert sum(reached) / len(reached) <= neighbours_probability(elems, count) * (1 + 1e-12)


def neighbours(places):
    """Yield the number of neighbouring pairs for each way to pair the places."""
    if not places:
        yield 0
        return
    first, *rest = places
    for other in rest:
        for count in neighbours([each for each in rest if each != other]):
            yield count + (other == first + 1)


def test_bound_is_exact_if_all_elements_are_paired():
    assert neighbours_probability(10, 10) == pytest.approx(1 / math.prod(range(1, 20, 2)))
    assert neighbours_probability(9, 9) > FALSE_ALARM >= neighbours_probability(10, 10)
