"""A patch refuses what is not there, notes what no longer fits, and leaves nothing behind."""

import pytest

from zero_sim.errors import MutantError
from zero_sim.mutants.patching import Patches
from zero_sim.zero.unit import Unit


def test_a_replacement_gets_the_original_and_is_counted():
    patches = Patches()

    @patches(Unit, "reduce")
    def wrong(right, self):
        return right, self

    original, given = Unit.reduce("me")
    assert given == "me"
    assert original.__qualname__ == "Unit.reduce"
    assert patches.armed == 1
    patches.restore()
    assert Unit.reduce is original


def test_a_property_stays_one():
    patches = Patches()
    patches(Unit, "_has_replica_sum")(lambda right, self: "replaced")
    try:
        assert vars(Unit)["_has_replica_sum"].fget(None) == "replaced"
    finally:
        patches.restore()


def test_a_name_that_does_not_exist_is_refused():
    with pytest.raises(MutantError, match=r"Unit\.reduze to replace, got None"):
        Patches()(Unit, "reduze")


@pytest.mark.parametrize(
    "wrong", [lambda right, **others: None, lambda right, self: None, lambda right, *all: None]
)
def test_a_replacement_without_room_for_what_the_original_takes_is_refused(wrong):
    patches = Patches()
    with pytest.raises(MutantError, match=r"one without (async_op|1 arguments by place)"):
        patches(Unit, "_sum_shards")(wrong)
    assert not patches.armed


def raised_by(wrong):
    patches = Patches()
    patches(Unit, "reduce")(wrong)
    try:
        with pytest.raises(AttributeError):
            Unit.reduce("me")
    finally:
        patches.restore()
    return patches.outdated


def test_a_replacement_whose_names_are_gone_is_noted():
    assert "no attribute 'gone'" in raised_by(lambda right, self: self.gone)


def test_what_the_system_raises_of_it_is_not():
    assert raised_by(lambda right, self: right(self)) == ""
