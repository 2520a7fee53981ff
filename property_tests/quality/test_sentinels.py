"""One mutant of each class, killed by drawn cases: the short form of `test_mutants.py`."""

import pytest

from zero_sim.mutants import find_mutants
from zero_sim.mutants.campaign import CASES_MAX, Budget, hunt
from zero_sim.mutants.records import CLASSES

SENTINELS = {
    "NORM": "M73",
    "CKPT": "M97",
    "ASYNC": "M45",
    "SCALE": "X01",
    "EMPTY": "W26",
    "ACCUM": "M37",
    "BUCKET": "J02",
    "ALIAS": "Z02",
    "DTYPE": "D01",
    "OPTST": "F06",
    "LAYOUT": "M07",
    "ORDER": "M107",
    "TIED": "T01",
    "GROUP": "G07",
    "INF": "I05",
    "VOLUME": "V15",
}
"""A mutant of each class that few cases kill."""


def test_every_mutant_class_has_a_sentinel():
    assert tuple(SENTINELS) == CLASSES
    assert {one.id: one.kind for one in find_mutants([*SENTINELS.values()])} == {
        id: kind for kind, id in SENTINELS.items()
    }


@pytest.mark.parametrize("id", SENTINELS.values())
def test_sentinel_is_killed(pool, id):
    (one,) = find_mutants([id])
    trial = hunt(one, pool=pool, budget=Budget(cases_max=CASES_MAX, shrinks=False, seed=0))
    assert not trial.error, trial.error
    assert trial.armed > 0
    assert trial.killed, f"{id} survived {trial.cases} cases: {one.description}"
