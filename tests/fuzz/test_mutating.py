"""Small changes of the system are tried on drawn cases; each ends with a verdict of its own."""

from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool

import pytest

from zero_sim.backends import WorldPool
from zero_sim.fuzz import mutating
from zero_sim.fuzz.mutating import Mutating, choose_changes, try_changes
from zero_sim.mutants.campaign import Budget, check_unbroken

ONE = Mutating(modules=("zero_sim.zero.norm",), cases_max=10)


@pytest.fixture(scope="module")
def changes():
    return choose_changes(ONE, count=10**6)[0]


def verdict_of(changes, function, before):
    chosen = [c for c in changes if (c.function, c.before) == (function, before)]
    (tried,) = try_changes(chosen, mutating=ONE)
    return tried.verdict


def test_a_wrong_count_of_zeros_is_found(changes):
    before = "flat.numel() - int(torch.count_nonzero(flat))"
    assert verdict_of(changes, "measure_grads", before) == "found"


def test_what_only_guards_the_memory_survives(changes):
    assert verdict_of(changes, "_chunks", "gathered_elems += piece.numel()") == "survived"


def test_what_no_case_runs_is_told_apart(changes):
    assert verdict_of(changes, "norm_is_certified", "count + 4") == "not reached"


def test_the_system_is_mended(changes):
    list(try_changes(changes[:2], mutating=ONE))
    with WorldPool() as pool:
        assert not check_unbroken(pool=pool, budget=Budget(cases_max=3)).killed


def test_a_seed_chooses_the_same_changes_again(changes):
    first, of = choose_changes(ONE, count=5)
    assert (first, of) == choose_changes(ONE, count=5)
    assert of == len(changes)
    assert len(first) == 5


def test_processes_say_what_one_process_says(changes):
    few = changes[:3]
    alone = {one.change.id: one.verdict for one in try_changes(few, mutating=ONE)}
    shared = {one.change.id: one.verdict for one in try_changes(few, mutating=ONE, jobs=2)}
    assert alone == shared


def test_a_process_that_dies_costs_the_changes_that_it_was_given(changes):
    chunk = changes[:2]
    lost: Future = Future()
    lost.set_exception(BrokenProcessPool("killed"))
    assert [one.verdict for one in mutating._tried(lost, chunk)] == ["error", "error"]
