"""A patch refuses what is not there or has changed, and leaves nothing behind."""

import types

import pytest

from zero_sim.errors import MutantError
from zero_sim.mutants import patching
from zero_sim.mutants.patching import Patches, check_fingerprint, fingerprint
from zero_sim.zero import norm
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
    with pytest.raises(MutantError, match=r"Unit\.reduze to replace but got None"):
        Patches()(Unit, "reduze")


def test_code_that_changed_is_refused(monkeypatch):
    name = patching.name_of(norm.clip_by_norm_)
    monkeypatch.setitem(patching.FINGERPRINTS, name, "0" * 12)
    with pytest.raises(MutantError, match="with fingerprint 000000000000, as mutants"):
        check_fingerprint(norm.clip_by_norm_)


def test_code_that_is_not_on_record_is_refused():
    def unknown():
        return 1

    with pytest.raises(MutantError, match="with fingerprint None"):
        check_fingerprint(unknown)


def written(tmp_path, name, text):
    path = tmp_path / f"{name}.py"
    path.write_text(text)
    module = types.ModuleType(name)
    exec(compile(text, str(path), "exec"), vars(module))
    return module.f


def test_a_fingerprint_is_of_what_code_does(tmp_path):
    plain = written(tmp_path, "plain", "def f(x):\n    return x + 1\n")
    told = written(tmp_path, "told", 'def f(x):\n    """Says."""\n    return (x  # why\n + 1)\n')
    other = written(tmp_path, "other", "def f(x):\n    return x + 2\n")
    assert fingerprint(plain) == fingerprint(told)
    assert fingerprint(plain) != fingerprint(other)
