"""The list of mutants is whole, and each of them still fits the code that it breaks."""

from collections import Counter

import pytest

from zero_sim.errors import MutantError, UsageError
from zero_sim.mutants import IMPOSSIBLE, MUTANTS, find_mutants
from zero_sim.mutants.records import CLASSES, mutant
from zero_sim.zero import (
    buffer,
    data_parallel,
    grad_unit,
    optimizer,
    reduce_buffers,
    schedule,
    storage,
    unit,
)

LISTED = {f"M{number:02}" for number in range(1, 116, 2)}


def test_ids_are_unique():
    assert Counter(one.id for one in MUTANTS).most_common(1)[0][1] == 1


def test_every_listed_bug_is_there_and_as_many_again():
    known = {one.id for one in MUTANTS}
    assert known >= LISTED
    assert len(known) >= 2 * len(LISTED)


def test_every_class_has_some_of_its_own():
    own = Counter(one.kind for one in MUTANTS if one.id not in LISTED)
    assert min(own[kind] for kind in CLASSES) >= 2


def test_what_is_impossible_is_a_mutant_of_another_form():
    assert {one.id for one in MUTANTS} >= IMPOSSIBLE.keys()


def test_every_mutant_fits_the_code_and_reverts():
    owners = [buffer, buffer.Buffer, data_parallel, optimizer, schedule, storage, unit]
    owners += [unit.Unit, schedule.UnderBackward, schedule.UnderForward, schedule.OnUse]
    owners += [grad_unit, grad_unit.GradUnit, reduce_buffers, reduce_buffers.ReduceBuffers]
    owners += [data_parallel.DistributedDataParallel, optimizer.DistributedOptimizer]
    before = [dict(vars(owner)) for owner in owners]
    for one in MUTANTS:
        with one.apply() as patches:
            assert patches.armed == 0, one.id
        assert before == [dict(vars(owner)) for owner in owners], one.id


def test_a_refused_patch_leaves_nothing_behind():
    def plant(patch):
        """Break two things, one of which is not there."""
        patch(unit.Unit, "reduce")(lambda right, self: None)
        patch(unit.Unit, "gone")

    broken = mutant("X", "NORM", seen_in="nothing")(plant)
    original = unit.Unit.reduce
    with pytest.raises(MutantError, match="gone"), broken.apply():
        pass
    assert unit.Unit.reduce is original


def test_an_unknown_flag_is_refused():
    with pytest.raises(MutantError, match="known flags"):
        mutant("X", "NORM", "DR XX", seen_in="nothing")(lambda patch: None)


def test_finding_by_class_and_core():
    assert {one.kind for one in find_mutants(kind="NORM")} == {"NORM"}
    assert all(one.core for one in find_mutants(core=True))
    assert [one.id for one in find_mutants(["M73"])] == ["M73"]


def test_what_is_not_known_is_refused():
    with pytest.raises(UsageError, match="'M999'"):
        find_mutants(["M999"])
    with pytest.raises(UsageError, match="one of NORM"):
        find_mutants(kind="NROM")
