"""JUnit XML: counts, outcomes, and text that no case can break."""

from xml.etree import ElementTree

import pytest

from zero_sim.errors import Problem, ScenarioError, UsageError
from zero_sim.findings.records import CaseResult, Finding
from zero_sim.report.junit import TestCase, case_of, file_of, junit_xml, write_junit
from zero_sim.scenario.spec import ModelSpec, RunSpec, Scenario, WorldSpec

SCENARIO = Scenario(
    schema=1, name="x", model=ModelSpec(name="mlp"), world=WorldSpec(order="ring"),
    run=RunSpec(steps=1, seed=7),
)  # fmt: skip


def judged(verdict, *, message="differs", text="all of it", error=""):
    found = (Finding(check="equality.grad", message=message),) if verdict == "fail" else ()
    result = CaseResult(id="x", verdict=verdict, seconds=1.25, findings=found, error=error)
    return case_of(result, scenario=SCENARIO, source="a/b.toml", text=text)


def parsed(*cases):
    root = ElementTree.fromstring(junit_xml(cases, seconds=2.5, started="2026-01-01T00:00:00"))
    (suite,) = root
    return suite


def test_counts_equal_the_cases():
    skipped = TestCase(name="x", source="b.toml", outcome="skipped", message="not run")
    suite = parsed(judged("pass"), judged("fail"), judged("error", error="no"), skipped)
    counts = {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "4", "failures": "1", "errors": "1", "skipped": "1"}
    assert suite.get("time") == "2.500"


@pytest.mark.parametrize(
    ("verdict", "outcome"), [("fail", "failure"), ("inconclusive", "failure"), ("error", "error")]
)
def test_other_verdicts_have_an_outcome(verdict, outcome):
    (case,) = parsed(judged(verdict))
    assert case.find(outcome) is not None


def test_pass_has_no_outcome():
    (case,) = parsed(judged("pass"))
    assert {child.tag for child in case} == {"properties", "system-out"}


def test_failure_contains_check_message_and_text():
    (case,) = parsed(judged("fail"))
    failure = case.find("failure")
    assert (failure.get("type"), failure.get("message")) == (
        "equality.grad", "equality.grad: differs",
    )  # fmt: skip
    assert failure.text == case.findtext("system-out") == "all of it"


def test_case_is_named_under_its_file():
    (case,) = parsed(judged("pass"))
    assert (case.get("name"), case.get("classname"), case.get("file"), case.get("time")) == (
        "x", "a.b", "a/b.toml", "1.250",
    )  # fmt: skip


def test_order_schedule_and_seed_are_properties():
    (case,) = parsed(judged("pass"))
    told = {each.get("name"): each.get("value") for each in case.find("properties")}
    assert (told["order"], told["schedule"], told["seed"]) == ("ring", "round-robin", "7")


def test_text_invalid_in_xml_is_spelled_out():
    text = "a <b> & \x1b[31m ]]> \x00 \ud800\nsecond line"
    (case,) = parsed(judged("fail", text=text, message=text))
    assert case.find("failure").text == "a <b> & \\x1b[31m ]]> \\x00 \\ud800\nsecond line"
    assert "\\x1b" in case.find("failure").get("message")


def test_file_that_is_no_scenario_is_an_error():
    (case,) = parsed(file_of(ScenarioError("bad.toml", [Problem(path="run", message="wrong")])))
    assert "run: wrong" in case.find("error").text


def test_file_is_replaced_atomically_and_its_folder_created(tmp_path):
    path = tmp_path / "deep" / "j.xml"
    for text in (b"one", b"two"):
        write_junit(path, text)
        assert path.read_bytes() == text
    assert [each.name for each in path.parent.iterdir()] == ["j.xml"]


def test_unwritable_path_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"expected to write JUnit XML to .*j\.xml, got: Not a"):
        write_junit(tmp_path / "file" / "j.xml", b"")
