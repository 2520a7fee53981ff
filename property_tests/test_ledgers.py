"""Measured memory and calls against closed forms, for shipped and drawn cases."""

from pathlib import Path

import pytest
from hypothesis import given, settings

from tests.profiles import at_most, is_nightly
from zero_sim.calculators.measure import measure
from zero_sim.calculators.network import Network
from zero_sim.calculators.traffic import traffic_of
from zero_sim.fuzz.strategies import scenarios
from zero_sim.scenario.load import load_cases
from zero_sim.targets import find_target, why_missing

IN_PAIRS = Network(ranks_per_node=2)
LINKS = (IN_PAIRS.inside, IN_PAIRS.between)
SHIPPED = Path(__file__).parents[1] / "scenarios"
RANKS_MAX = 64
FILES = sorted(SHIPPED.glob("**/*.toml"))


def is_right(case):
    """Return True if the system is correct; a measured run omits planned faults."""
    return case.expect.finding is None or bool(case.faults)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(SHIPPED)) for path in FILES])
def test_ledgers_of_shipped_scenarios_match_closed_forms(path):
    """Checks the first and last case of each file, or all under the profile `nightly`."""
    cases = [case for case in load_cases(path) if case.world.size <= RANKS_MAX and is_right(case)]
    for missing in {why_missing(find_target(case.system.target)) for case in cases} - {""}:
        pytest.skip(missing)
    for case in cases if is_nightly() else [*cases[:1], *cases[-1:]]:
        measured = measure(case)
        assert list(measured.differences()) == [], case.name


@given(scenario=scenarios(reload=False))
@settings(max_examples=at_most(60))
def test_ledgers_of_drawn_cases_match_closed_forms(scenario):
    measured = measure(scenario)
    assert measured.is_costed
    assert list(measured.differences()) == []
    first = measured.groups[0]
    for index, rank in enumerate(first.ranks):
        owed = traffic_of(
            measured.sizes[rank], scenario=first.scenario, rank=index, network=IN_PAIRS
        )
        made = measured.traffic(rank, network=IN_PAIRS)
        assert [owed.sent_over(link) for link in LINKS] == [made.sent_over(link) for link in LINKS]
