"""Proven bounds: no correct system fails if the order of its sums is undeclared."""

from dataclasses import replace

from hypothesis import given, note, settings

from tests.profiles import at_most
from zero_sim import run_case
from zero_sim.fuzz.strategies import scenarios
from zero_sim.scenario.conditions import why_order_matters

JUDGED_BY_BOUNDS = scenarios(reload=False).filter(lambda case: not why_order_matters(case))


@given(scenario=JUDGED_BY_BOUNDS)
@settings(max_examples=at_most(200))
def test_correct_system_stays_within_bounds(pool, scenario):
    world = replace(scenario.world, order="random-tree", order_known=False)
    result = run_case(replace(scenario, world=world), pool=pool)
    note(str(result))
    assert result.verdict in ("pass", "inconclusive")
    assert result.compared_elems > 0
