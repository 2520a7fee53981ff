"""History of benchmarks: a ratio that is worse twice is found; other units are not compared."""

from dataclasses import replace

import pytest

from zero_sim.bench.history import append_history, find_worse, read_history
from zero_sim.errors import UsageError
from zero_sim.report.records import Measurement, WorseRatio

ROW = Measurement(name="a", value=2.0, unit="x")
LEAST = replace(ROW, at_least=True)


def never(name):
    raise AssertionError(f"{name} was measured again")


def test_runs_are_read_in_order(tmp_path):
    path = tmp_path / "history.jsonl"
    assert read_history(path) == []
    append_history(path, [ROW])
    append_history(path, [replace(ROW, value=3.0), replace(ROW, name="b", unit="ms")])
    assert read_history(path) == [{"a": 2.0}, {"a": 3.0, "b": 2.0}]


@pytest.mark.parametrize("text", ["{", "[]", '{"measurements": [{"name": "a"}]}', "3"])
def test_invalid_history_is_refused(tmp_path, text):
    path = tmp_path / "history.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match="a line of JSON for each run"):
        read_history(path)


@pytest.mark.parametrize(
    ("row", "before"),
    [(ROW, 1.75), (ROW, 5.0), (LEAST, 2.29), (LEAST, 1.0), (replace(ROW, unit="ms"), 1.0)],
)
def test_slightly_worse_ratio_or_other_unit_is_no_finding(row, before):
    assert find_worse([row], history=[{"a": before}], again=never) == []


@pytest.mark.parametrize(("row", "before"), [(ROW, 1.7), (LEAST, 2.4)])
def test_ratio_that_is_worse_twice_is_found(row, before):
    found = find_worse([row], history=[{"a": before}], again=lambda name: row)
    assert found == [WorseRatio(name="a", value=2.0, before=before)]


def test_ratio_that_is_better_the_second_time_is_no_finding():
    again = iter([replace(ROW, value=1.0)])
    assert find_worse([ROW], history=[{"a": 1.0}], again=lambda name: next(again)) == []


def test_baseline_is_the_median_of_the_last_five_runs():
    history = [{"a": 9.0}] * 9 + [{"a": value} for value in (1.0, 1.0, 1.0, 9.0, 9.0)]
    found = find_worse([ROW], history=history, again=lambda name: ROW)
    assert [each.before for each in found] == [1.0]


def test_new_figure_is_not_compared():
    assert find_worse([ROW], history=[{"b": 1.0}], again=never) == []
