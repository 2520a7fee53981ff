"""The harness's own score: every mutant of the core set dies, within few cases."""

import pytest

from zero_sim.mutants import find_mutants
from zero_sim.mutants.campaign import Budget, check_unbroken, hunt

CASES_MAX = 250
core = find_mutants(core=True)


@pytest.mark.parametrize("one", core, ids=[one.id for one in core])
def test_a_core_mutant_dies(pool, one):
    trial = hunt(one, pool=pool, budget=Budget(cases_max=CASES_MAX))
    assert not trial.error, trial.error
    assert trial.armed > 0
    assert trial.killed, f"{one.id} survived {trial.cases} cases: {one.description}"


def test_the_unbroken_system_survives_the_same_campaign(pool):
    trial = check_unbroken(pool=pool, budget=Budget(cases_max=100))
    assert not trial.killed, trial.check
    assert trial.cases == 100
