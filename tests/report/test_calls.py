"""Calls around a finding."""

from dataclasses import replace

import pytest

from tests.report.calls import call
from zero_sim.findings.records import UNOBSERVED, Finding, MappedBucket
from zero_sim.report.calls import calls_near, observed_grads, render_calls
from zero_sim.sim import EventLog


def logged(*kinds, refused=None):
    """Return a log of calls by two ranks, rank 0 first. Each call is a name, or a name and its
    elements.
    """
    log = EventLog()
    for number, named in enumerate(kinds):
        kind, elems = named if isinstance(named, tuple) else (named, 4)
        for rank in (0, 1):
            log.add(
                call(kind, rank=rank, number=number, elems=elems, asynchronous=kind == "all_gather")
            )
    log.refused = refused
    return log


def finding(**facts):
    return Finding(**{"check": "c.d", "message": "", "rank": 1, "phase": "reduce", **facts})


LOG = logged("broadcast", "barrier", "barrier", "reduce_scatter", "all_gather", "barrier", "x", "y")


def kinds(calls):
    return [(call.record.kind, call.when) for call in calls]


def test_calls_before_in_and_after_the_step_are_listed():
    near = calls_near(LOG, finding(call_start=6, call_stop=10))
    assert kinds(near.suspects) == [("reduce_scatter", "in")]
    assert kinds(near.others) == [
        ("barrier", "before"),
        ("barrier", "before"),
        ("all_gather", "in"),
        ("barrier", "after"),
        ("x", "after"),
    ]
    assert {call.record.rank for call in (*near.suspects, *near.others)} == {1}
    assert near.left_out == 0


@pytest.mark.parametrize(
    ("phase", "kind"), [("reduce", "reduce_scatter"), ("gather", "all_gather")]
)
def test_calls_that_carry_the_difference_are_suspects(phase, kind, even_strip):
    strip = replace(even_strip(), check="c.d")
    near = calls_near(LOG, finding(phase=phase, call_start=6, call_stop=10), strip)
    assert [call.record.kind for call in near.suspects] == [kind]


def test_all_data_calls_are_suspects_if_only_params_are_reported():
    # An average over a second group is first observed in the params gathered after it.
    log = logged("barrier", "reduce_scatter", "all_reduce", "all_gather", "barrier")
    near = calls_near(log, finding(phase="gather", call_start=0, call_stop=10))
    assert [call.record.kind for call in near.suspects] == [
        "reduce_scatter",
        "all_reduce",
        "all_gather",
    ]


def test_param_difference_makes_no_suspect_without_gradients():
    """The optimizer's settings may be wrong and every call right."""
    log = logged("barrier", "all_reduce", "all_gather", "barrier")
    at = finding(check="equality.params", phase="gather", call_start=0, call_stop=8)
    assert calls_near(log, at).suspects == ()
    lines = render_calls(log, at)
    assert "none of them a suspect: the system reports only its params" in lines[0]
    assert not any(">" in line for line in lines[1:])


def test_gathers_are_suspects_of_a_param_difference_with_right_gradients():
    log = logged("barrier", "all_reduce", "all_gather", "barrier")
    at = finding(check="equality.params", phase="gather", call_start=0, call_stop=8)
    near = calls_near(log, at, shows_grads=True)
    assert [call.record.kind for call in near.suspects] == ["all_gather"]


def test_observed_gradients_are_not_called_unreported():
    at = finding(check="equality.params", phase="gather", call_start=0, call_stop=8)
    head = render_calls(logged("barrier", "all_reduce"), at, shows_grads=True)[0]
    assert "none of them a suspect: the reported gradients are right" in head
    assert "only its params" not in head


@pytest.mark.parametrize(
    ("silent", "observed"),
    [("norm, reduced gradients, zeros", False), ("gradients between steps, norm", True)],
)
def test_notes_state_whether_gradients_were_observed(silent, observed):
    assert observed_grads(["a note", UNOBSERVED + silent]) == observed


def test_only_calls_of_the_differing_size_are_suspects(even_strip):
    # A bucket of 24 elements in shards of 6: the norm's three elements carry none of it.
    log = logged(("reduce_scatter", 24), ("all_reduce", 6), ("all_reduce", 3), ("all_reduce", 99))
    strip = replace(even_strip(), check="c.d")
    near = calls_near(log, finding(flat_offset=7, call_start=0, call_stop=8), strip)
    assert [call.record.elems for call in near.suspects] == [24, 6]


def test_all_suspects_of_a_long_step_are_listed():
    names = ["reduce_scatter"] * 9 + ["all_gather"] * 9
    near = calls_near(logged(*names), finding(call_start=0, call_stop=36))
    assert len(near.suspects) == 9
    assert (len(near.others), near.left_out) == (6, 3)
    lines = render_calls(logged(*names), finding(call_start=0, call_stop=36))
    assert [">" in line for line in lines[1:]] == [True] * 9 + [False] * 7
    assert "... 3 more in this step" in lines[10]


def test_many_suspects_of_one_code_line_share_a_line():
    log = logged(*[("reduce_scatter", 8), ("all_reduce", 4)] * 9, ("reduce_scatter", 12))
    log.collectives = [c._replace(line=len(c.kind)) for c in log.collectives]
    lines = render_calls(log, finding(call_start=0, call_stop=60))
    assert [line.rpartition(" at ")[2] for line in lines[1:]] == [
        "train.py:14; 10 such calls, to #18, of 8 to 12 elements",
        "train.py:10; 9 such calls, to #17",
    ]


class TestMissing:
    """Expected calls that are missing, as far as sizes can show it."""

    def missing(self, strip, *calls, **facts):
        at = finding(**{"flat_offset": 7, "call_start": 0, "call_stop": 2 * len(calls), **facts})
        return calls_near(logged(*calls), at, replace(strip, check="c.d")).missing

    def test_missing_reduction_of_a_bucket_is_reported(self, even_strip):
        said = self.missing(even_strip(), ("all_reduce", 3), ("all_gather", 24))
        assert said == (
            "no call in this step reduces 24 elements, the size of bucket 0, elements [0, 24); "
            "was it issued?"
        )

    def test_fewer_reductions_than_buckets_are_reported(self, even_strip):
        two = (MappedBucket(index=0, start=0, stop=12), MappedBucket(index=1, start=12, stop=24))
        strip = replace(even_strip(), buckets=two)
        said = self.missing(strip, ("all_reduce", 12), flat_offset=13)
        assert said == (
            "1 call in this step reduces 12 elements, but 2 buckets have this size; was a call "
            "issued for bucket 1, elements [12, 24)?"
        )

    def test_no_missing_call_is_reported_if_sizes_match(self, even_strip):
        assert self.missing(even_strip(), ("reduce_scatter", 24)) == ""
        assert self.missing(even_strip(), ("barrier", 1), phase="optimizer") == ""

    def test_missing_call_is_rendered_first(self, even_strip):
        strip = replace(even_strip(), check="c.d")
        at = finding(flat_offset=7, call_start=0, call_stop=2)
        assert render_calls(logged("barrier"), at, strip)[1].startswith("  missing  no call")


def test_refused_call_is_a_suspect():
    log = logged("barrier", "all_reduce", refused=3)
    near = calls_near(log, finding(phase=None))
    assert [call.index for call in near.suspects] == [3]


def test_no_calls_without_a_rank_or_a_log():
    assert calls_near(LOG, finding(rank=None)) is None
    assert render_calls(EventLog(), finding()) == []


def test_calls_are_rendered_verbatim():
    assert render_calls(LOG, finding(call_start=6, call_stop=8)) == [
        "calls of rank 1, suspects first, marked >:",
        "  step   > reduce_scatter #3 of group world (float32, 4 elements) at train.py:3",
        "  before   barrier #1 of group world (float32, 4 elements) at train.py:1",
        "           barrier #2 of group world (float32, 4 elements) at train.py:2",
        "  after    all_gather #4 of group world (float32, 4 elements) at train.py:4, async",
        "           barrier #5 of group world (float32, 4 elements) at train.py:5",
    ]
