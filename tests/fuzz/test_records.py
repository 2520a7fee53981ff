"""Records of batches: they roundtrip through JSON, or are refused."""

import json

import pytest

from tests.fuzz.corpus_reports import found, report_of
from zero_sim.fuzz.records import BatchReport, from_json, to_json
from zero_sim.shrink.keys import Key

FOUND = found("equality.grad", bundle="0123456789ab", places=("padding",))
REPORT = report_of(
    0,
    cases=2,
    verdicts={"pass": 1, "fail": 1},
    taken={"a rule"},
    found=(FOUND,),
    cases_with={"reload": 0b10},
)


def changed(path, value):
    """Return the JSON of the report with another value at a dotted path."""
    data = inner = json.loads(to_json(REPORT))
    *tables, last = path.split(".")
    for name in tables:
        inner = inner[int(name) if name.isdecimal() else name]
    inner[last] = value
    return json.dumps(data)


def test_report_roundtrips_through_json():
    assert from_json(BatchReport, to_json(REPORT)) == REPORT
    assert from_json(BatchReport, to_json(REPORT)).found[0].key == Key("equality.grad")


@pytest.mark.parametrize("bundle", ["../../etc", "/etc", "..", "0123456789ab/..", "\n", None])
def test_bundle_must_be_an_id(bundle):
    """It becomes part of a path that is moved and removed."""
    with pytest.raises(ValueError, match="found: 0: bundle: "):
        from_json(BatchReport, changed("found.0.bundle", bundle))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("index", "0"),
        ("index", True),
        ("index", -1),
        ("index", 1 << 63),
        ("start", 0.5),
        ("counts.seconds", float("nan")),
        ("counts.seconds", "1"),
        ("counts.verdicts", {"pass": "1"}),
        ("counts.verdicts", []),
        ("counts.params_only", -1),
        ("counts.taken", [1]),
        ("lost", None),
        ("complete", 1),
        ("found.0.text", 1),
        ("found.0.case", "x"),
        ("found.0.places", [[1]]),
        ("found.0.key", [1]),
        ("found.0.apart", float("inf")),
    ],
)
def test_every_field_is_checked_for_its_type(path, value):
    with pytest.raises(ValueError, match=path.replace(".", ": ")):
        from_json(BatchReport, changed(path, value))


MANY = {f"system.options.o{number}=1": 1 for number in range(1_001)}


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("counts.params_only", 2, "expected params_only of 1 passes, got 2"),
        ("counts.verdicts", {"pass": 3}, "expected counts of 2 cases"),
        ("counts.keys", {"a": 3, "b": -3}, "expected counts of 2 cases"),
        ("counts.unobserved", {"norm": 3}, "expected unobserved in 2 cases"),
        ("counts.unobserved", MANY, "expected unobserved in 2 cases"),
        ("cases_with", {"reload": -1}, "expected features of 2 cases"),
        ("cases_with", {"reload": 0b100}, "expected features of 2 cases"),
        ("cases_with", {"reload": 1 << 100}, "expected features of 2 cases"),
        ("cases_with", MANY, "expected features of 2 cases"),
    ],
)
def test_counts_are_checked_against_the_number_of_cases(path, value, words):
    with pytest.raises(ValueError, match=words):
        from_json(BatchReport, changed(path, value))
