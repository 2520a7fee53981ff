"""Catalogue of mutants: complete, and each one fits the code that it breaks."""

import sys
from collections import Counter
from inspect import isclass, isfunction, unwrap

import pytest

from zero_sim.errors import MutantError, UsageError
from zero_sim.mutants import IMPOSSIBLE, MUTANTS, find_mutants
from zero_sim.mutants.records import CLASSES, mutant
from zero_sim.zero import unit

LISTED = {f"M{number:02}" for number in range(1, 116, 2)}


def test_ids_are_unique():
    assert Counter(one.id for one in MUTANTS).most_common(1)[0][1] == 1


def test_every_listed_bug_has_a_mutant_and_half_are_unlisted():
    known = {one.id for one in MUTANTS}
    assert known >= LISTED
    assert len(known) >= 2 * len(LISTED)


def test_every_class_has_unlisted_mutants():
    own = Counter(one.kind for one in MUTANTS if one.id not in LISTED)
    assert min(own[kind] for kind in CLASSES) >= 2


def test_impossible_mutants_have_another_form():
    assert {one.id for one in MUTANTS} >= IMPOSSIBLE.keys()


def test_every_mutant_fits_the_code_and_reverts():
    modules = [module for name, module in sys.modules.items() if name.startswith("zero_sim.")]
    classes = [each for module in modules for each in vars(module).values() if isclass(each)]
    owners = {id(each): each for each in [*modules, *classes] if _is_own(each)}

    def state():
        functions = [f for owner in owners.values() for f in vars(owner).values() if isfunction(f)]
        codes = {id(f): f.__code__ for f in map(unwrap, functions) if isfunction(f)}
        return codes, {id(owner): dict(vars(owner)) for owner in owners.values()}

    before = state()
    for one in MUTANTS:
        with one.apply() as patches:
            assert patches.armed == 0, one.id
    assert state() == before


def _is_own(owner):
    return getattr(owner, "__module__", owner.__name__).startswith("zero_sim.")


def test_refused_patch_changes_nothing():
    def plant(patch):
        """Replace a fragment that occurs twice."""
        patch[unit.Unit.reduce, "async_op=False"] = "async_op=True"

    original = unit.Unit.reduce.__code__
    with pytest.raises(MutantError, match=r"mutant X no longer fits .* got it 2 times"):
        mutant("X", "NORM", seen_in="nothing")(plant)
    assert unit.Unit.reduce.__code__ is original


def test_unknown_flag_is_refused():
    with pytest.raises(MutantError, match="known flags"):
        mutant("X", "NORM", "DR XX", seen_in="nothing")(lambda patch: None)


def test_mutants_are_found_by_class_and_core():
    assert {one.kind for one in find_mutants(kind="NORM")} == {"NORM"}
    assert all(one.core for one in find_mutants(core=True))
    assert [one.id for one in find_mutants(["M73"])] == ["M73"]


def test_unknown_mutant_or_class_is_refused():
    with pytest.raises(UsageError, match="'M999'"):
        find_mutants(["M999"])
    with pytest.raises(UsageError, match="one of NORM"):
        find_mutants(kind="NROM")
