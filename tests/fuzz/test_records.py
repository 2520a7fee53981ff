"""What a corpus holds of a batch: come back as it was, or not at all."""

from __future__ import annotations

import json

import pytest

from zero_sim.fuzz.records import BatchReport, Found
from zero_sim.shrink.keys import Key

FOUND = Found(
    key=Key("equality.grad", "reduce", "dense", "m", "p"),
    message="it differs",
    seed=1,
    case=2,
    scenario="schema = 1\n",
    bundle="0123456789ab",
    text="FAIL",
    size="1 rank",
    places=("padding",),
)
REPORT = BatchReport(
    index=0, seed=1, asked=2, cases=2, seconds=0.5, verdicts={"pass": 1, "fail": 1}, found=(FOUND,),
    cases_with={"reload": 0b10},
)  # fmt: skip


def test_a_report_comes_back() -> None:
    assert BatchReport.from_dict(json.loads(json.dumps(REPORT.as_dict()))) == REPORT


@pytest.mark.parametrize("count", [-1, 2])
def test_no_more_cases_than_pass_do_so_by_params_only(count: int) -> None:
    with pytest.raises(ValueError, match=f"expected params_only of 1 passes, got {count}"):
        BatchReport.from_dict({**REPORT.as_dict(), "params_only": count})


def test_a_report_of_an_earlier_version_has_no_pass_by_params_only() -> None:
    data = REPORT.as_dict()
    del data["params_only"]
    assert BatchReport.from_dict(data) == REPORT


@pytest.mark.parametrize("bundle", ["../../etc", "/etc", "..", "0123456789ab/..", "\n", None])
def test_a_bundle_is_called_by_its_id(bundle: object) -> None:
    """It becomes part of a path, which is moved and removed."""
    data = REPORT.as_dict()
    data["found"][0]["bundle"] = bundle
    with pytest.raises((ValueError, TypeError)):
        BatchReport.from_dict(data)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("index", "0"),
        ("index", True),
        ("seconds", float("nan")),
        ("seconds", "1"),
        ("verdicts", {"pass": "1"}),
        ("verdicts", []),
        ("lost", None),
        ("complete", 1),
    ],
)
def test_every_field_is_of_its_type(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"expected {name} to be"):
        BatchReport.from_dict({**REPORT.as_dict(), name: value})


@pytest.mark.parametrize(("name", "value"), [("text", 1), ("case", "x"), ("places", [[1]])])
def test_so_is_every_field_of_a_finding(name: str, value: object) -> None:
    data = REPORT.as_dict()
    data["found"][0][name] = value
    with pytest.raises(TypeError, match=f"expected {name} to be"):
        BatchReport.from_dict(data)


@pytest.mark.parametrize("which", [-1, 0b100, 1 << 100])
def test_features_are_of_the_cases_that_ran(which: int) -> None:
    with pytest.raises(ValueError, match="expected features of 2 cases"):
        BatchReport.from_dict({**REPORT.as_dict(), "cases_with": {"reload": which}})


def test_more_features_than_there_can_be_are_refused() -> None:
    many = {f"system.options.o{number}=1": 1 for number in range(1_001)}
    with pytest.raises(ValueError, match="expected features of 2 cases"):
        BatchReport.from_dict({**REPORT.as_dict(), "cases_with": many})


def test_a_report_of_an_earlier_form_has_no_features() -> None:
    data = REPORT.as_dict() | {"layouts": {"aligned": 2}}
    del data["cases_with"]
    report = BatchReport.from_dict(data)
    assert (report.cases, report.cases_with) == (2, {})
