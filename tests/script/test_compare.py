"""Description of the first difference between two runs."""

import re

import pytest

from zero_sim.script.record import Point, ScriptRun, first_difference
from zero_sim.script.settings import Settings


def point(name="step", *, visit=0, **digests):
    return Point(
        name=name,
        visit=visit,
        site="train.py:9",
        digests={key: value.encode() for key, value in digests.items()},
    )


def run(seed, *, points=((), ()), output=(), ending="every rank reached its end", failure=None):
    return ScriptRun(
        settings=Settings(ranks_per_node=2),
        seed=seed,
        failure=failure,
        ending=ending,
        output=output,
        points=points,
        collective_count=0,
    )


def test_equal_runs_do_not_differ():
    made = [run(seed, points=((point(w="a"),),), output=("x",)) for seed in (0, 1)]
    assert first_difference(*made) == ""


def test_earliest_differing_point_of_any_rank_is_reported():
    first = run(0, points=((point(w="a"), point(visit=1, w="a")), (point(w="a", b="b", c="c"),)))
    other = run(4, points=((point(w="a"), point(visit=1, w="z")), (point(w="a", b="y", c="x"),)))
    assert first_difference(first, other).splitlines() == [
        "at point 'step', visit 0, at train.py:9, rank 1 differs in b",
        f"  seed 0: {b'b'.hex()}",
        f"  seed 4: {b'y'.hex()}",
        "  and in 1 of 3 other values: c",
    ]


def test_value_of_only_one_run_is_reported():
    told = first_difference(run(0, points=((point(),),)), run(1, points=((point(w="a"),),)))
    assert "differs in w\n  seed 0: not there\n" in told


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ((point("load"),), "reached point 'load', visit 0, at train.py:9, with seed 0, and point"),
        ((point(), point(visit=1)), "only with seed 0, rank 0 reached point 'step', visit 1"),
    ],
)
def test_different_points_are_reported(points, said):
    assert said in first_difference(run(0, points=(points,)), run(1, points=((point(),),)))


def test_different_endings_are_reported():
    first = run(0, points=((point(),),), output=("x",))
    other = run(1, points=((),), ending="rank 0 raised", failure=ValueError())
    assert first_difference(first, other) == (
        "the runs ended differently\n  seed 0: every rank reached its end\n  seed 1: rank 0 raised"
    )


def test_lines_keep_their_numbers_if_some_are_ignored():
    first = run(0, output=("took 1 s", "loss 2"))
    other = run(1, output=("took 2 s", "loss 2", "done"))
    assert "line 1 of" in first_difference(first, other)
    assert first_difference(first, other, ignored=re.compile("took")) == (
        "line 3 of rank 0's output differs\n  seed 0: (none)\n  seed 1: done"
    )
