"""What became of changes, in lines and sums."""

import pytest

from zero_sim.mutants.changes import Change
from zero_sim.mutants.records import ChangeTrial, Trial
from zero_sim.report.changes import render_change, render_changes


def tried(*, killed=False, armed=1, error="", after="a + b"):
    change = Change(
        module="m", function="f", line=3, column=4, end=(3, 9), kind="arithmetic",
        before="a - b", after=after,
    )  # fmt: skip
    check = "equality.grad" if killed else ""
    trial = Trial(id="x", killed=killed, check=check, cases=2, armed=armed, error=error)
    return ChangeTrial(change=change, trial=trial)


@pytest.mark.parametrize(
    ("one", "line"),
    [
        (tried(killed=True), "m:3 f: 'a - b' -> 'a + b': found by equality.grad after 2 cases"),
        (tried(), "m:3 f: 'a - b' -> 'a + b': SURVIVED after 2 cases"),
        (tried(armed=0, after=""), "m:3 f: without 'a - b': not reached after 2 cases"),
        (tried(error="ill"), "m:3 f: 'a - b' -> 'a + b': ERROR after 2 cases\n      ill"),
    ],
)
def test_a_change_in_a_line(one, line):
    assert render_change(one) == line


def test_what_was_never_reached_is_not_counted_against_the_checks():
    text = render_changes([tried(killed=True), tried(), tried(armed=0)], of=9, seconds=1.25)
    assert "m  1 of 2 found, 1 not reached" in text
    assert "3 of 9 changes in 1.2 s: 1 of 2 found, 1 not reached" in text
    assert "What survives" in text
