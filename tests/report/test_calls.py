"""The calls around a finding."""

import pytest

from zero_sim.report.calls import calls_near, render_calls
from zero_sim.sim import CollectiveRecord, EventLog
from zero_sim.verify.records import Finding


def logged(*kinds, refused=None):
    """Each call by both of two ranks, rank 0 first."""
    log = EventLog()
    for number, kind in enumerate(kinds):
        for rank in (0, 1):
            log.add(
                CollectiveRecord(
                    rank=rank,
                    kind=kind,
                    group="world",
                    group_ranks=(0, 1),
                    sequence=number,
                    dtype="float32",
                    elems=4,
                    elem_bytes=4,
                    detail="",
                    asynchronous=kind == "all_gather",
                    file="/somewhere/deep/train.py",
                    line=number,
                )
            )
    log.refused = refused
    return log


def finding(**facts):
    return Finding(check="c.d", message="", **{"rank": 1, "phase": "reduce", **facts})


LOG = logged("broadcast", "barrier", "barrier", "reduce_scatter", "all_gather", "barrier", "x", "y")


def test_some_before_those_of_the_step_and_some_after():
    near = calls_near(LOG, finding(call_start=6, call_stop=10))
    assert [(call.record.kind, call.when) for call in near.calls] == [
        ("barrier", "before"),
        ("barrier", "before"),
        ("reduce_scatter", "in"),
        ("all_gather", "in"),
        ("barrier", "after"),
        ("x", "after"),
    ]
    assert {call.record.rank for call in near.calls} == {1}
    assert near.left_out == 0


@pytest.mark.parametrize(
    ("phase", "kind"), [("reduce", "reduce_scatter"), ("gather", "all_gather")]
)
def test_what_carries_the_difference_is_marked(phase, kind):
    near = calls_near(LOG, finding(phase=phase, call_start=6, call_stop=10))
    assert [call.record.kind for call in near.calls if call.suspect] == [kind]


def test_a_long_step_is_cut_at_its_front():
    near = calls_near(LOG, finding(call_start=0, call_stop=16))
    assert (len(near.calls), near.left_out) == (6, 2)
    assert near.calls[-1].record.kind == "y"
    assert "  ... 2 more of this step" in render_calls(LOG, finding(call_start=0, call_stop=16))


def test_a_call_that_did_not_fit_is_marked():
    log = logged("barrier", "all_reduce", refused=3)
    near = calls_near(log, finding(phase=None))
    assert [call.index for call in near.calls if call.suspect] == [3]


def test_nothing_without_a_rank_or_without_calls():
    assert calls_near(LOG, finding(rank=None)) is None
    assert render_calls(EventLog(), finding()) == []


def test_word_for_word():
    assert render_calls(LOG, finding(call_start=6, call_stop=8)) == [
        "calls of rank 1, suspects marked >:",
        "  before   barrier #1 of group world (float32, 4 elements) at train.py:1",
        "           barrier #2 of group world (float32, 4 elements) at train.py:2",
        "  step   > reduce_scatter #3 of group world (float32, 4 elements) at train.py:3",
        "  after    all_gather #4 of group world (float32, 4 elements) at train.py:4, async",
        "           barrier #5 of group world (float32, 4 elements) at train.py:5",
    ]
