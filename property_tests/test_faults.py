"""Planned faults in drawn cases, each found by its expected check."""

from hypothesis import given, note, settings

from tests.faulty_cases import faulty_scenarios
from tests.profiles import at_most
from zero_sim import run_case


@given(scenario=faulty_scenarios())
@settings(max_examples=at_most(150))
def test_planned_fault_is_found_by_its_check(pool, scenario):
    result = run_case(scenario, pool=pool)
    note(str(result))
    assert result.verdict == "pass"
