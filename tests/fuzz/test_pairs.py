"""Pairs of layouts, drawn for targets without an update rule for the reference."""

from itertools import islice

import pytest

from tests.targets.momentum8 import Faulty, Fixed
from zero_sim import run_case
from zero_sim.fuzz.choices import Drawable
from zero_sim.fuzz.drawing import draws
from zero_sim.fuzz.pairs import needs_pair, pairable, with_second_layout
from zero_sim.fuzz.plans import param_specs
from zero_sim.fuzz.strategies import drawn_cases
from zero_sim.scenario.rules import check_scenario
from zero_sim.targets import capabilities_of, refusals
from zero_sim.targets.own import ZeroSimTarget


def drawn(target, count, *, seed="1"):
    return list(islice(draws(drawn_cases(target), seed=seed, simplest=True), count))


class Paired(ZeroSimTarget):
    """zero_sim, restricted to the capabilities of pairs."""

    capabilities = pairable(capabilities_of(ZeroSimTarget()))


@pytest.fixture(scope="module")
def own_pairs():
    target = Paired()
    inner = drawn_cases(target, reload=False, models_from=target.capabilities.models)

    def pair(choices):
        case = inner.drawn(choices)
        sizes = [spec.numel for spec in param_specs(case.model)]
        return with_second_layout(choices, case, able=target.capabilities, sizes=sizes)

    return list(islice(draws(Drawable(pair), seed="5", simplest=True), 12))


def test_every_drawn_case_has_a_valid_second_layout():
    target = Fixed()
    for case in drawn(target, 30):
        assert case.pair is not None
        assert not check_scenario(case)
        assert not refusals(target, case)


def test_world_sizes_and_stages_of_pairs_are_drawn():
    pairs = [case.pair for case in drawn(Fixed(), 30)]
    assert {pair.world_size for pair in pairs} == {None, 1, 2, 4}
    assert {pair.stage for pair in pairs} == {None, 0, 1}


def test_target_with_a_rule_needs_no_pair():
    assert not needs_pair(ZeroSimTarget())
    assert not any(case.pair for case in drawn(ZeroSimTarget(), 20))


def test_state_that_depends_on_shard_size_is_found_in_few_cases(pool):
    target = Faulty()
    results = (run_case(case, pool=pool, target=target) for case in drawn(target, 5, seed="7"))
    failed = next(result for result in results if result.verdict == "fail")
    assert failed.findings[0].check == "equality.layout"


def test_every_part_of_a_layout_is_drawn(own_pairs):
    for name in ("world_size", "stage", "redundancy", "bucket_elems", "partition", "param_order"):
        assert any(getattr(case.pair, name) is not None for case in own_pairs)


def test_zero_sim_has_the_same_state_in_both_layouts(own_pairs, pool):
    for case in own_pairs[:2]:
        assert run_case(case, pool=pool).verdict in ("pass", "inconclusive")
