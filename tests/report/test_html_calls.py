"""Calls around a finding in the HTML report, with the ranks that issued them."""

import re
from dataclasses import replace

import pytest

from tests.report.calls import call
from zero_sim.findings.records import Finding
from zero_sim.report.html_calls import RANKS_MAX, SUSPECTS_MAX, class_of, legend, near_calls
from zero_sim.sim import EventLog


def logged(*kinds, ranks=(0, 1), absent=()):
    """Return a log in which every rank issues each call, except that absent ranks skip the last
    one.
    """
    log = EventLog()
    for number, kind in enumerate(kinds):
        for rank in ranks:
            if rank in absent and number == len(kinds) - 1:
                continue
            log.add(call(kind, rank=rank, number=number, group_ranks=tuple(ranks)))
    return log


def finding(**facts):
    return Finding(
        **{"check": "c.d", "message": "m", "rank": 0, "phase": "reduce", "step": 1, **facts}
    )


def rows(markup):
    return re.findall(r"<tr[^>]*>.*?</tr>", markup)


def test_each_call_is_a_row_with_a_mark_per_rank():
    log = logged("barrier", "reduce_scatter", "all_gather")
    text = near_calls(log, finding(call_start=2, call_stop=6), None)
    head, before, barrier, step, suspect, other = rows(text)
    assert re.findall(r">([^<]+)</t[hd]>", head) == ["call, and the ranks that came", "0", "1"]
    assert ">before<" in before
    assert ">step 1<" in step
    assert 'class="suspect step"' in suspect
    assert suspect.count('class="key rs"') == 2
    assert "reduce_scatter #1" in suspect
    assert "at train.py:1" in suspect
    assert 'class="key other"' in barrier
    assert 'class="key ag"' in other
    assert "suspect" not in other


def test_missing_rank_is_marked():
    log = logged("barrier", "all_reduce", absent=(1,))
    text = near_calls(log, finding(), None)
    assert "never came</span>" in text
    last = rows(text)[-1]
    assert last.count('class="key ar"') == 1
    assert last.count('title="rank 1 never came"') == 1


def test_legend_omits_marks_not_used():
    text = near_calls(logged("barrier"), finding(), None)
    assert "never came" not in text
    assert "suspect" not in text


def test_ranks_near_that_of_the_finding_are_shown():
    log = logged("all_reduce", ranks=range(40))
    head = rows(near_calls(log, finding(rank=20), None))[0]
    shown = [int(cell) for cell in re.findall(r">(\d+)</th>", head)]
    assert len(shown) == RANKS_MAX
    assert 20 in shown
    assert max(abs(rank - 20) for rank in shown) <= RANKS_MAX
    assert re.search(r'<th class="own">20</th>', head)


def shown_ranks(text):
    return [int(cell) for cell in re.findall(r">(\d+)</th>", rows(text)[0])]


def test_omitted_ranks_are_listed():
    text = near_calls(logged("all_reduce", ranks=range(9)), finding(), None)
    assert shown_ranks(text) == [0, 1, 2, 3, 4, 5]
    assert "Not shown of the ranks of these calls: 6-8." in text
    assert "Not shown" not in near_calls(logged("all_reduce", ranks=range(6)), finding(), None)


def test_ranks_with_a_difference_are_shown_before_neighbours(even_strip):
    strip = replace(even_strip(), check="c.d", differ_ranks=(0, 7, 8))
    text = near_calls(logged("all_reduce", ranks=range(9)), finding(), strip)
    assert shown_ranks(text) == [0, 1, 2, 3, 7, 8]


def test_missing_rank_is_shown_before_all_others(even_strip):
    strip = replace(even_strip(), check="c.d", differ_ranks=tuple(range(8)))
    text = near_calls(logged("all_reduce", ranks=range(9), absent=(8,)), finding(), strip)
    assert shown_ranks(text) == [0, 1, 2, 3, 4, 8]


def test_first_suspects_of_many_are_shown():
    log = logged(*["all_reduce"] * 30)
    text = near_calls(log, finding(call_start=0, call_stop=60), None)
    assert text.count('class="suspect step"') == SUSPECTS_MAX
    assert f"And {30 - SUSPECTS_MAX} more suspects" in text


def test_missing_call_is_reported_above_the_table(even_strip):
    log = logged("barrier")
    at = finding(check="equality.grad", flat_offset=3, call_start=0, call_stop=2)
    assert "Missing: no call in this step reduces 24 elements" in near_calls(log, at, even_strip())


def test_no_table_for_a_finding_without_a_rank():
    assert near_calls(logged("barrier"), finding(rank=None), None) is None


KINDS = ["reduce_scatter", "all_reduce", "all_gather", "all_to_all", "broadcast", "send", "barrier"]


def test_kinds_of_calls_look_different():
    assert len({class_of(kind) for kind in KINDS}) == len(KINDS)
    assert class_of("reduce_scatter_list") == class_of("reduce_scatter")


@pytest.mark.parametrize("kind", KINDS)
def test_legend_names_exactly_the_marks_in_use(kind):
    text = legend([kind], ("open", "never completed"))
    assert text.count("<span>") == 2
    assert f'class="key {class_of(kind)}"' in text
    assert text.endswith('<i class="key open"></i>never completed</span></p>')
