"""Mutation score: every mutant is killed within few cases and shrinks to its recorded minimum.

Runs the core set by default, and all mutants under the profile `nightly`.
"""

import pytest

from tests.profiles import is_nightly
from zero_sim.mutants import find_mutants
from zero_sim.mutants.campaign import CASES_MAX, Budget, check_unbroken, hunt

CORE_CASES_MAX = 750
BEGINNINGS_MAX = 5
hunted = find_mutants(core=not is_nightly())


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("one", hunted, ids=[one.id for one in hunted])
def test_mutant_is_killed_and_shrinks_to_recorded_minimum(pool, one):
    cases_max = CORE_CASES_MAX if one.core else CASES_MAX
    shrunk = []
    # The shrunk case depends on the first one, so only one of several must reach the minimum.
    for seed in range(BEGINNINGS_MAX):
        budget = Budget(cases_max=cases_max, shrinks=True, seed=seed)
        trial = hunt(one, pool=pool, budget=budget)
        assert not trial.error, trial.error
        assert trial.armed > 0
        assert trial.killed, f"{one.id} survived {trial.cases} cases: {one.description}"
        shrunk.append(trial)
        if trial.size <= trial.minimum:
            break
    # A smaller case is fine: new settings of cases can open shorter paths.
    least = min(shrunk, key=lambda trial: trial.size)
    assert least.size <= least.minimum, f"{one.id} shrank to\n{least.smallest}"


def test_unmodified_system_passes_the_same_campaign(pool):
    trial = check_unbroken(pool=pool, budget=Budget(cases_max=100))
    assert not trial.killed, trial.check
    assert trial.cases == 100
