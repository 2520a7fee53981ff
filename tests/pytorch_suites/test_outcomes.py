"""Changes of the record by a run of PyTorch's suites: losses, gains, reasons, and the table."""

import json

import pytest

from tests.pytorch_suites.outcomes import (
    RECORD,
    Outcome,
    Record,
    find_gains,
    find_losses,
    read_record,
    table,
    with_reasons,
    write_record,
)

SAME = Outcome("pass", "pass", "pass")
DIFFERENT = Outcome("pass", "fail", "pass", "a limit")


@pytest.mark.parametrize(
    ("before", "now", "loss"),
    [
        (
            SAME,
            Outcome("pass", "pass", "fail"),
            "passed on simulated ranks, hostile, and is now: fail",
        ),
        (
            SAME,
            Outcome("pass", "crash", "pass"),
            "passed on simulated ranks, eager, and is now: crash",
        ),
        (DIFFERENT, Outcome("pass", "fail", "fail", "a limit"), "hostile, and is now: fail"),
        (SAME, None, "passed and is gone"),
    ],
)
def test_passed_test_that_no_longer_passes_is_a_loss(before, now, loss):
    seen = {} if now is None else {"T.test": now}
    (found,) = find_losses({"suite": seen}, {"suite": {"T.test": before}})
    assert found.startswith("suite T.test: ")
    assert found.endswith(loss)


@pytest.mark.parametrize(
    ("before", "now"),
    [(SAME, SAME), (DIFFERENT, DIFFERENT), (DIFFERENT, SAME), (None, SAME), (None, DIFFERENT)],
)
def test_pass_or_difference_with_a_reason_is_no_loss(before, now):
    known = {} if before is None else {"T.test": before}
    assert find_losses({"suite": {"T.test": now}}, {"suite": known}) == []


def test_unrecorded_difference_without_reason_is_a_loss():
    seen = {"suite": {"T.test": Outcome("pass", "fail", "fail")}}
    assert find_losses(seen, {}) == ["suite T.test: differs from the baseline and has no reason"]


def test_recorded_difference_that_passes_is_a_gain():
    assert find_gains({"s": {"T.a": SAME}}, {"s": {"T.a": DIFFERENT}}) == ["s T.a"]
    assert find_gains({"s": {"T.a": DIFFERENT}}, {"s": {"T.a": DIFFERENT}}) == []


def test_reason_is_kept_while_its_test_differs():
    seen = {"T.a": Outcome("pass", "fail", "fail"), "T.b": SAME}
    kept = with_reasons(seen, {"T.a": DIFFERENT, "T.b": DIFFERENT})
    assert kept == {"T.a": Outcome("pass", "fail", "fail", "a limit"), "T.b": SAME}


def test_record_round_trips(tmp_path):
    record = Record("2.13.0", "2.6.0", {"a": {"T.x": SAME, "T.y": DIFFERENT}, "b": {"T.z": SAME}})
    write_record(record, tmp_path / "record.json")
    assert read_record(tmp_path / "record.json") == record


def test_table_counts_passes_and_lists_reasons():
    failed = Outcome("fail", "", "")
    assert table({"suite": {"T.a": SAME, "T.b": DIFFERENT, "T.c": failed}}) == [
        "suite      run baseline    eager  hostile",
        "suite        3        2        1        2",
        "all          3        2        1        2",
        "",
        "1 differ from the baseline:",
        "  T.b: eager and hostile: a limit",
    ]


def test_every_recorded_difference_has_a_reason():
    record = read_record()
    assert record.suites
    reasons = {
        test: outcome.reason
        for tests in record.suites.values()
        for test, outcome in tests.items()
        if outcome.differs
    }
    assert [test for test, reason in reasons.items() if not reason] == []


def test_record_file_has_the_written_format(tmp_path):
    write_record(read_record(), tmp_path / "record.json")
    assert (tmp_path / "record.json").read_text() == RECORD.read_text()
    assert set(json.loads(RECORD.read_text())) == {"torch", "source", "suites"}
