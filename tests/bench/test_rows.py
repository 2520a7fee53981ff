"""The benchmark takes the figures that are asked for, each beside its goal."""

import re

import pytest

from zero_sim.bench import rows
from zero_sim.bench.peers import PROGRAMS, ratio_of
from zero_sim.bench.rows import ROWS, run_benchmarks
from zero_sim.errors import EnvironmentProblem, UsageError


def test_names_tell_figures_apart():
    names = [figure.name for row in ROWS for figure in row.figures]
    assert len({*names}) == len(names)


def test_only_figures_that_are_asked_for_are_taken():
    (taken,) = run_benchmarks(only="mismatch named")
    assert taken.value > 0
    assert taken.ok is (taken.value <= taken.goal)


def test_a_part_that_no_name_has_is_refused():
    with pytest.raises(
        UsageError, match=r"got 'mismach'\. Did you mean 'mismatch'\? Figures: warm"
    ):
        list(run_benchmarks(only="mismach"))


@pytest.mark.parametrize(("value", "ok"), [(1999.0, False), (2000.0, True)])
def test_a_goal_may_be_the_least(monkeypatch, value, ok):
    figure = rows._figure("a", "a second", least=2000.0)
    monkeypatch.setattr(rows, "ROWS", (rows._row(figure, take=lambda: value),))
    (taken,) = run_benchmarks()
    assert (taken.value, taken.ok, taken.at_least) == (value, ok, True)


@pytest.mark.parametrize("peer", ["threaded", "in-lock-step"])
def test_a_program_runs_on_peers(peer):
    assert ratio_of("all-reduce", peer=peer, repeats=1) > 0


def test_what_a_peer_cannot_run_is_said():
    with pytest.raises(EnvironmentProblem, match=re.escape("expected ddp in-lock-step to run")):
        ratio_of("ddp", peer="in-lock-step", repeats=1)


def test_each_program_has_a_row():
    assert {*PROGRAMS} == {"all-reduce", "fsdp2", "ddp"}
