"""The harness's own score: every mutant dies within few cases and shrinks to what is on record.

The core set on every change; under the profile `nightly`, all of them.
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
    # What a case shrinks to depends on where it begins: one of so many must come to the minimum.
    for seed in range(BEGINNINGS_MAX):
        budget = Budget(cases_max=cases_max, shrinks=True, seed=seed)
        trial = hunt(one, pool=pool, budget=budget)
        assert not trial.error, trial.error
        assert trial.armed > 0
        assert trial.killed, f"{one.id} survived {trial.cases} cases: {one.description}"
        shrunk.append(trial)
        if trial.size <= trial.minimum:
            break
    # A smaller one is no fault: whatever else cases come to have is one more place to begin at.
    least = min(shrunk, key=lambda trial: trial.size)
    assert least.size <= least.minimum, f"{one.id} shrank to\n{least.smallest}"


def test_unmodified_system_passes_the_same_campaign(pool):
    trial = check_unbroken(pool=pool, budget=Budget(cases_max=100))
    assert not trial.killed, trial.check
    assert trial.cases == 100
