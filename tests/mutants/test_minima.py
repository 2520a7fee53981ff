"""The minimum of each mutant is on record, and is what reason says where reason says something."""

import pytest

from zero_sim.mutants import MINIMA, MUTANTS
from zero_sim.shrink import Size


def test_every_mutant_has_one_and_nothing_else_has():
    assert MINIMA.keys() == {one.id for one in MUTANTS}


@pytest.mark.parametrize(
    ("id", "least"),
    [
        # A border between two shards, and an element on either side of it.
        ("L01", (2, 1, 2, 1, 0)),
        # A rank that owns nothing: one element, two ranks.
        ("E03", (2, 1, 1, 1, 0)),
        # The last of several buckets: two, so two params, each as large as a bucket.
        ("B04", (1, 2, 2, 1, 1)),
        # A param that just fills its bucket.
        ("M13", (1, 1, 1, 1, 1)),
        # Two copies of the state, on a rank each.
        ("M29", (2, 1, 1, 1, 1)),
        # Copies, and a sum after each of two micro-batches.
        ("M43", (2, 1, 1, 1, 3)),
        # A division by two rounds nothing: three ranks.
        ("S03", (3, 1, 1, 1, 0)),
        # What is carried over to the next step, where accumulation begins anew.
        ("M41", (1, 1, 1, 2, 1)),
        # As words, "10" comes before "2": eleven pieces.
        ("M95", (11, 1, 11, 2, 1)),
        # Two groups of two ranks each.
        ("M65", (4, 1, 1, 1, 1)),
        # A scale that grows a step late: grown after one step, used in the next.
        ("I05", (1, 1, 1, 2, 2)),
    ],
)
def test_what_reason_says(id, least):
    names = ("ranks", "params", "elements", "steps", "features")
    assert MINIMA[id] == Size(**dict(zip(names, least, strict=True)))
