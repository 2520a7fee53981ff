"""Changed code runs wherever the function is held, and only while it is asked for."""

import pytest

from tests.mutants.sample import Sized, last_of, remembered
from zero_sim.errors import UsageError
from zero_sim.mutants.swapping import Changed, Loaded

NAME = "tests.mutants.sample"


@pytest.fixture(scope="module")
def loaded():
    return Loaded([NAME])


def test_every_function_with_a_change_is_found():
    own = Loaded(
        [NAME, *(f"zero_sim.zero.{name}" for name in ("buffer", "norm", "optimizer", "unit"))]
    )
    one_each = {(change.module, change.function): change for change in own.changes()}
    assert len(one_each) > 50
    for change in one_each.values():
        with own.changed(change):
            pass


def change_of(loaded, function, before):
    (one,) = [c for c in loaded.changes() if (c.function, c.before) == (function, before)]
    return one


def test_the_function_that_others_imported_is_changed_and_mended(loaded):
    with loaded.changed(change_of(loaded, "last_of", "count - 1")):
        assert last_of(5) == 6
    assert last_of(5) == 4


def test_methods_of_all_sorts_are_changed(loaded):
    with loaded.changed(change_of(loaded, "Sized.doubled", "2 * self.size")):
        assert Sized(5).doubled == 7
    with loaded.changed(change_of(loaded, "Sized.half", "size // 2")):
        assert Sized.half(5) == 10
    assert (Sized(5).doubled, Sized.half(5)) == (10, 2)


def test_what_was_remembered_is_forgotten(loaded):
    assert remembered(5) == 4
    with loaded.changed(change_of(loaded, "last_of", "count - 1")):
        assert remembered(5) == 6
    assert remembered(5) == 4


def test_runs_of_the_changed_function_are_counted(loaded):
    broken = Changed(loaded, change_of(loaded, "last_of", "count - 1"))
    with broken.apply() as runs:
        assert runs.armed == 0
        last_of(1), last_of(2)
    assert runs.armed == 2
    last_of(3)
    assert runs.armed == 2


def test_an_error_mends_it(loaded):
    with (
        pytest.raises(RuntimeError),
        loaded.changed(change_of(loaded, "last_of", "count - 1")),
    ):
        raise RuntimeError
    assert last_of(5) == 4


@pytest.mark.parametrize("name", ["tests.mutants.nothing", "math"])
def test_a_module_without_source_is_refused(name):
    with pytest.raises(UsageError, match=name):
        Loaded([name])
