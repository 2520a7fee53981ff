"""Names and texts that forge lines, recolour terminals or hide text are harmless in reports."""

import dataclasses
import json
import pickle

import pytest

from tests.report.calls import call
from zero_sim.bundle import Bundle, Replayed
from zero_sim.bundle.records import current_environment
from zero_sim.findings.records import CaseResult, Finding
from zero_sim.mutants import find_mutants
from zero_sim.mutants.records import HuntResult
from zero_sim.report.html import render_page
from zero_sim.report.mutants import render_hunt
from zero_sim.report.text import render_bundle, render_case, render_replay
from zero_sim.report.timeline import read_timeline
from zero_sim.report.traces import chrome_trace, flight_recorder_dumps
from zero_sim.scenario.dump import to_toml
from zero_sim.scenario.spec import ModelSpec, Scenario
from zero_sim.sim import EventLog

FORGED = "PASS  everything  0.001 s"
NASTY = f"a\n{FORGED}\r{FORGED}\x1b[2J\x1b]0;title\x07\0\x9b31m\u202e\u200b\u2028{FORGED}\x0b\x85z"


def nasty_log():
    """Return a log of two ranks and a refused collective, in which every name is NASTY."""
    log = EventLog()
    for number in range(2):
        for rank in (0, 1):
            log.turns.append(rank)
            log.note(rank, "issue", len(log.collectives))
            named = {
                "group": NASTY,
                "dtype": NASTY,
                "detail": NASTY,
                "file": f"/x/{NASTY}",
                "line": 1,
            }
            log.add(call(f"all_reduce{NASTY}", rank=rank, number=number, **named))
            log.tick += 1
    log.refused = 3
    return log


@pytest.fixture
def bundle(even_strip):
    """Bundle in which every text is NASTY."""
    finding = Finding(
        check=f"equality{NASTY}",
        message=NASTY,
        step=0,
        phase=NASTY,
        rank=1,
        param=NASTY,
        expected=NASTY,
        got=NASTY,
        expected_value=NASTY,
        got_value=NASTY,
        detail=NASTY,
    )
    model = ModelSpec(name="params", shapes=((3,),))
    return Bundle(
        id="0123456789ab",
        scenario=Scenario(schema=1, name=NASTY, description=NASTY, model=model),
        verdict="fail",
        findings=(finding, finding),
        notes=(NASTY,),
        environment=dataclasses.replace(current_environment(), torch=NASTY),
        logs=(nasty_log(),),
        strip=dataclasses.replace(even_strip(names=(NASTY, "b")), check=finding.check),
    )


def result_of(bundle):
    """Return the result of the bundle's case, with an error added."""
    return CaseResult(
        id=NASTY,
        verdict="fail",
        seconds=1.0,
        findings=bundle.findings,
        notes=bundle.notes,
        strip=bundle.strip,
        logs=bundle.logs,
        error=NASTY,
    )


def texts(bundle):
    """Return all texts that a terminal shows."""
    result = result_of(bundle)
    yield render_case(result, case=to_toml(bundle.scenario), reproduce=NASTY, replay=NASTY)
    yield render_case(dataclasses.replace(result, verdict="error"))
    yield render_bundle(bundle)
    replayed = Replayed(
        id=bundle.id,
        outcome="error",
        result=dataclasses.replace(result, verdict="error"),
        then=bundle.findings[0],
        same_events=False,
        differences=tuple(bundle.environment.differences(current_environment())),
        exit_status=2,
    )
    yield render_replay(replayed)
    trial = HuntResult(id="M05", killed=False, armed=1, cases=1, seconds=1.0, error=NASTY)
    yield render_hunt(trial, find_mutants(["M05"])[0])


def test_no_line_is_forged(bundle):
    shown = list(texts(bundle))
    for text in shown:
        assert FORGED in text
        assert not any(line.startswith("PASS") for line in text.splitlines())
        assert text.replace("\n", "").isprintable()


def test_page_contains_only_printable_characters(bundle):
    page = render_page([bundle, bundle])
    assert FORGED in page
    assert page.replace("\n", "").replace("\t", "").isprintable()


def test_traces_contain_only_printable_characters(bundle):
    trace = json.loads(json.dumps(chrome_trace(bundle.logs, name="case")))
    dumps = flight_recorder_dumps(read_timeline(bundle.logs[0]))
    for text in strings([trace, pickle.loads(pickle.dumps(dumps))]):
        assert text.isprintable()


def strings(value):
    """Return all strings in nested data, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from strings([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings(item)


def test_long_name_is_shown_in_full(bundle):
    long = "n" * 50_000
    finding = dataclasses.replace(bundle.findings[0], param=f"<b>{long}")
    page = render_page([dataclasses.replace(bundle, findings=(finding,))])
    assert f"&lt;b&gt;{long}" in page
    assert "<b>" not in page
