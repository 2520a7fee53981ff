"""Declarations of rank-local state and of the package that a target judges."""

import os

import pytest

from zero_sim.errors import EnvironmentProblem, ProtocolError, UsageError
from zero_sim.targets import Library, RankLocal, rank_local_of, why_missing
from zero_sim.targets.rank_local import prepare


class Target:
    name = "theirs"

    def __init__(self, **declared):
        vars(self).update(declared)

    def build(self, module, *, scenario, group): ...


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"names": "lib:GROUP"}, r"Try \('lib:GROUP',\)"),
        ({"names": ("lib.GROUP",)}, "such as 'package.module:GLOBAL', got 'lib.GROUP'"),
        ({"names": ("lib:f(a, b)",)}, r"got 'lib:f\(a, b\)'"),
        ({"packages": ("lib.part",)}, "a top-level package, got 'lib.part'"),
    ],
)
def test_invalid_name_is_refused(declared, message):
    with pytest.raises(UsageError, match=message):
        RankLocal(**declared)


def test_target_without_a_declaration_has_no_rank_local_state():
    assert rank_local_of(Target()) is None
    assert rank_local_of(Target(rank_local=None)) is None


def test_declaration_of_another_type_is_an_error():
    with pytest.raises(ProtocolError, match=r"'rank_local' of target 'theirs'.*got \['lib:X'\]"):
        rank_local_of(Target(rank_local=["lib:X"]))


def test_missing_package_names_the_extra_that_installs_it():
    target = Target(library=Library(package="no_such_lib", extra="nosuch"))
    assert why_missing(target).endswith('Try `pip install "zero-sim[nosuch]"`.')
    with pytest.raises(EnvironmentProblem, match="needs the package 'no_such_lib'"):
        prepare(target)


def test_library_environment_keeps_variables_already_set(monkeypatch):
    monkeypatch.setenv("ZERO_SIM_A", "theirs")
    monkeypatch.delenv("ZERO_SIM_B", raising=False)
    environment = (("ZERO_SIM_A", "ours"), ("ZERO_SIM_B", "ours"))
    prepare(Target(library=Library(package="json", extra="x", environment=environment)))
    assert (os.environ["ZERO_SIM_A"], os.environ.pop("ZERO_SIM_B")) == ("theirs", "ours")
