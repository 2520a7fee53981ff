"""A planted mistake shrinks to a case that a person can hold in the head."""

from zero_sim.mutants import find_mutants
from zero_sim.mutants.campaign import Budget, hunt


def test_an_off_by_one_shrinks_to_two_ranks_and_two_params(pool):
    (off_by_one,) = find_mutants(["L01"])
    trial = hunt(off_by_one, pool=pool, budget=Budget(cases_max=200, shrinks=True))
    assert trial.killed
    assert trial.ranks == 2
    assert trial.params is not None
    assert trial.params <= 2
