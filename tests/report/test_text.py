"""Results as text, verbatim."""

import dataclasses

import pytest
import torch

from zero_sim.findings.records import CaseResult, Evidence, Finding
from zero_sim.report.explain import explain
from zero_sim.report.records import Fact, Measurement, render_facts, render_measurements
from zero_sim.report.text import (
    FINDINGS_SHOWN,
    id_width,
    render_case,
    render_case_line,
    render_explanation,
    render_finding,
    render_reduced,
    render_summary,
)
from zero_sim.scenario.spec import ModelSpec, RunSpec, Scenario
from zero_sim.shrink import Reduced, Size
from zero_sim.sim import CollectiveRecord, EventLog

FINDING = Finding(
    check="equality.master",
    message="the fp32 master differs from the reference",
    step=4,
    phase="update",
    rank=2,
    param="blocks.1.down.weight",
    index=(1, 17),
    offset_in_param=49,
    flat_offset=1041,
    bucket=3,
    shard=2,
    shard_start=1024,
    shard_stop=1536,
    expected="0x1.912p-3",
    got="0x1.919p-3",
    expected_value="0.19583",
    got_value="0.19585",
    ulp=7,
    differ_count=3,
    compared_count=1400,
    detail="one\n\n  two",
)
PASSED = CaseResult(
    id="toy/size=4", verdict="pass", seconds=0.2129, compared_elems=1_234_567, collectives=12
)
FAILED = CaseResult(id="toy", verdict="fail", seconds=1.0, findings=(FINDING,), compared_elems=1)


def test_case_line_of_a_pass():
    assert render_case_line(PASSED, width=16) == (
        "PASS  toy/size=4           0.213 s  1,234,567 elements compared, 12 collectives"
    )


def test_case_line_of_an_error_contains_its_cause():
    result = CaseResult(id="toy", verdict="error", seconds=0.0, error="no params\nmore")
    assert render_case_line(result) == "ERROR toy     0.000 s  no params"

    assert render_case(result).splitlines()[1:] == ["      more"]


@pytest.mark.parametrize(("ulp", "has_hint"), [(1, True), (5, False)])
def test_update_with_another_rounding_has_a_hint(ulp, has_hint):
    finding = Finding(check="equality.master", message="differs", ulp=ulp)
    result = dataclasses.replace(PASSED, verdict="fail", findings=(finding,))
    assert ("declare it as `reference_step`" in render_case(result)) == has_hint


@pytest.mark.parametrize("columns", [80, 100])
def test_id_is_shortened_to_fit_the_terminal(columns):
    result = dataclasses.replace(PASSED, id="a-long-name-of-a-file/with=many,values=in,its=id")
    line = render_case_line(result, width=48, columns=columns)
    assert len(line) <= columns
    assert line.split()[1].startswith("a-")
    assert line.split()[1].endswith("id")


def test_finding_block_contains_all_its_fields():
    assert render_finding(FINDING).splitlines() == [
        "equality.master: the fp32 master differs from the reference",
        "  at        step 4, phase update, rank 2, param 'blocks.1.down.weight'[1, 17], "
        "flat offset 1041, bucket 3, shard 2 [1024, 1536)",
        "  expected  0x1.912p-3 (0.19583)",
        "  got       0x1.919p-3 (0.19585)   7 ulp apart",
        "  extent    3 of 1,400 elements differ",
        "    one",
        "",
        "      two",
    ]


@pytest.mark.parametrize(
    ("compared", "said"),
    [
        (3, "3 of 3 elements differ, by up to 0.25 of the largest value"),
        (9, "3 of 9 elements differ, by up to 0.25 of the largest value of the 3 around the first"),
    ],
)
def test_extent_contains_the_largest_difference(compared, said):
    """The first element that differs may do so by rounding only."""
    expected, got = torch.tensor([1.0, 4.0, 1e-9]), torch.tensor([1.0000001, 3.0, 3e-9])
    evidence = Evidence(start=0, expected=expected, got=got)
    finding = Finding(
        check="a.b", message="c", ulp=1, differ_count=3, compared_count=compared, evidence=evidence
    )
    assert render_finding(finding).splitlines()[1] == f"  extent    {said}"


def test_finding_with_a_message_only_is_one_line():
    assert render_finding(Finding(check="a.b", message="c")) == "a.b: c"


def test_rank_and_step_zero_are_shown():
    assert "step 0, rank 0" in render_finding(Finding(check="a", message="b", step=0, rank=0))


def test_offset_replaces_an_unknown_index():
    finding = Finding(check="a", message="b", param="w", offset_in_param=5)
    assert "param 'w'[5]" in render_finding(finding)


def test_long_detail_is_cut():
    text = render_finding(Finding(check="a", message="b", detail="x\n" * 1000))
    assert len(text.splitlines()) < 70
    assert text.endswith("... 940 more lines; --json has them all")


def test_failed_case_contains_its_reproduce_command():
    lines = render_case(FAILED, reproduce="zero-sim run a.toml -k toy").splitlines()
    assert lines[0].startswith("FAIL  toy")
    assert lines[1] == "  equality.master: the fp32 master differs from the reference"
    assert lines[-2:] == [
        "  reproduce: zero-sim run a.toml -k toy",
        "  explain: zero-sim explain equality.master",
    ]


def test_parts_of_a_failed_case_are_in_order(even_strip):
    log = EventLog()
    log.add(CollectiveRecord(2, "barrier", "world", (2,), 0, "", 0, 0, "", False, "a.py", 1))
    result = dataclasses.replace(
        FAILED,
        strip=dataclasses.replace(even_strip(), check="equality.master"),
        logs=(log,),
        notes=("a note",),
    )
    text = render_case(result, case='[model]\nname = "mlp"\n', reproduce="R", replay="P")
    starts = [
        "  equality.master: the",
        "    flat buffer 0, 24",
        "    differ       ^^",
        "    calls of rank 2:",
        "  note: a note",
        "  case:",
        '    name = "mlp"',
        "  reproduce: R",
        "  replay: P",
        "  explain: zero-sim explain equality.master",
    ]
    lines = text.splitlines()
    places = [next(i for i, line in enumerate(lines) if line.startswith(s)) for s in starts]
    assert places == sorted(places)
    assert max(map(len, lines)) <= 100 or "at " in max(lines, key=len)


def test_strip_of_another_finding_is_not_shown(even_strip):
    result = dataclasses.replace(FAILED, strip=even_strip())
    assert "flat buffer" not in render_case(result)


def test_explanation_is_wrapped():
    lines = render_explanation(explain("equality.grad")).splitlines()
    assert lines[0] == "equality.grad"
    assert [line[2:9].strip() for line in lines[1:] if line[2:3].strip()] == [
        "meaning",
        "why",
        "causes",
        "next",
        "seen in",
    ]
    assert max(map(len, lines)) <= 100


def test_passed_case_is_one_line():
    assert len(render_case(PASSED, reproduce="x").splitlines()) == 1


def test_notes_follow_the_case_line():
    result = dataclasses.replace(PASSED, notes=("held-out accuracy 0.9611",))
    assert render_case(result).splitlines()[1] == "  note: held-out accuracy 0.9611"


def test_further_findings_are_counted():
    """The first is nearly always the cause."""
    result = dataclasses.replace(FAILED, findings=(Finding(check="a", message="b"),) * 8)
    text = render_case(result)
    assert text.count("a: b") == FINDINGS_SHOWN
    assert "and 3 more findings" in text


def test_id_column_has_a_limit():
    """One long id does not widen the column for all."""
    assert (id_width([]), id_width(["a", "bcd"]), id_width(["x" * 500])) == (0, 3, 72)


class TestSummary:
    def test_summary_of_passes(self):
        assert render_summary([PASSED], seconds=1.26) == "1 case: 1 passed in 1.3 s"

    def test_summary_lists_every_verdict(self):
        doubtful = dataclasses.replace(PASSED, verdict="inconclusive")
        broken = dataclasses.replace(PASSED, verdict="error")
        results = [PASSED, PASSED, FAILED, doubtful, broken, broken]
        assert render_summary(results, seconds=12.3, bad_files=1, left_out=4) == (
            "10 cases: 2 passed, 1 failed, 1 inconclusive, 2 errors, 4 not run in 12.3 s; "
            "1 file could not be read"
        )


def test_facts_are_a_table():
    facts = [
        Fact(name="torch", value="2.13.0", ok=True),
        Fact(name="sim backend", value="broken", ok=False, note="why"),
    ]
    assert render_facts(facts).splitlines() == [
        "ok  torch        2.13.0",
        "NO  sim backend  broken  why",
    ]


def test_measurements_are_a_table():
    rows = [
        Measurement(name="all_reduce", value=1.5, unit="ms", goal=1.0, ok=False),
        Measurement(name="memory", value=1.05, unit="x", goal=1.1, ok=True),
        Measurement(name="layouts", value=9.0, unit="1/s", goal=10.0, ok=False, at_least=True),
        Measurement(name="cases", value=61.0, unit="1/s"),
    ]
    assert render_measurements(rows).splitlines() == [
        "MISS  all_reduce  1.5 ms  goal at most 1 ms",
        "ok    memory      1.05 x  goal at most 1.1 x",
        "MISS  layouts     9 1/s   goal at least 10 1/s",
        "      cases       61 1/s",
    ]


def test_reports_are_plain_ascii():
    """No locale can break one."""
    assert render_case(FAILED, reproduce="x").isascii()


def test_records_become_plain_objects():
    plain = FAILED.as_dict()
    assert plain["verdict"] == "fail"
    assert plain["notes"] == []
    assert plain["findings"][0]["index"] == [1, 17]
    assert plain["findings"][0]["shard_stop"] == 1536


def test_reduced_case_is_rendered_with_its_sizes():
    scenario = Scenario(schema=1, model=ModelSpec(name="mlp"), run=RunSpec(steps=1))
    reduced = Reduced(
        scenario=scenario,
        size=Size(ranks=1, params=1, elements=2, steps=1, features=0),
        before=Size(ranks=3, params=4, elements=50, steps=2, features=5),
        cases=1,
        seconds=0.25,
        stopped=None,
    )
    assert render_reduced(reduced) == (
        "  before      3 ranks, 4 params, 50 elements, 2 steps, 5 features\n"
        "  smallest    1 rank, 1 param, 2 elements, 1 step, 0 features; 1 case, 0.2 s"
    )
    cut_short = dataclasses.replace(reduced, stopped="cases")
    assert render_reduced(cut_short).endswith(
        "; stopped by the limit on cases, a smaller one may exist"
    )
