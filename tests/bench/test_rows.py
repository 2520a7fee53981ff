"""Rows of the benchmark: requested figures with their goals."""

import re

import pytest

from zero_sim.bench import rows
from zero_sim.bench.peers import PROGRAMS, ratio_of
from zero_sim.bench.rows import ROWS, run_benchmarks
from zero_sim.errors import EnvironmentProblem, UsageError


def test_figure_names_are_unique():
    names = [figure.name for row in ROWS for figure in row.figures]
    assert len({*names}) == len(names)


def test_only_requested_figures_are_measured():
    (taken,) = run_benchmarks(only="mismatch named")
    assert taken.value > 0
    assert taken.ok is (taken.value <= taken.goal)


def test_unknown_figure_is_refused():
    with pytest.raises(
        UsageError, match=r"got 'mismach'\. Did you mean 'mismatch'\? Figures: warm"
    ):
        list(run_benchmarks(only="mismach"))


@pytest.mark.parametrize(("value", "ok"), [(1999.0, False), (2000.0, True)])
def test_goal_may_be_a_minimum(monkeypatch, value, ok):
    figure = rows._figure("a", "a second", least=2000.0)
    monkeypatch.setattr(rows, "ROWS", (rows._row(figure, take=lambda: value),))
    (taken,) = run_benchmarks()
    assert (taken.value, taken.ok, taken.at_least) == (value, ok, True)


@pytest.mark.parametrize("peer", ["threaded", "in-lock-step"])
def test_program_runs_on_peers(peer):
    assert ratio_of("all-reduce", peer=peer, repeats=1) > 0


def test_unsupported_peer_is_an_environment_problem():
    with pytest.raises(EnvironmentProblem, match=re.escape("expected ddp in-lock-step to run")):
        ratio_of("ddp", peer="in-lock-step", repeats=1)


def test_each_program_has_a_row():
    assert {*PROGRAMS} == {"all-reduce", "fsdp2", "ddp"}
