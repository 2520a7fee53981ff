"""Tiers: measured slow tests are marked, and the nightly run reports new ones."""

import json
from types import SimpleNamespace

import pytest

from tests import tiers

SLOW = next(name for name in tiers.read_slow_tests() if not tiers.is_kept_fast(name))
KEPT = "tests/mutants/test_smallest.py::test_the_case_finds_the_mutant[M01]"


class Item:
    """The attributes of a pytest item that marking uses."""

    def __init__(self, node_id):
        self.nodeid = node_id
        self.marks = []

    def add_marker(self, mark):
        self.marks.append(mark.name)


def test_slow_tests_are_marked_unless_kept_fast():
    items = [Item(SLOW), Item(KEPT), Item("tests/test_x.py::test_new")]
    tiers.pytest_collection_modifyitems(items)
    assert [item.marks for item in items] == [["slow"], [], []]


def test_every_kept_fast_pattern_matches_a_test_file():
    paths = [pattern.split("::")[0] for pattern in tiers.KEPT_FAST]
    assert all(any(tiers.ROOT.glob(path)) for path in paths)


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Check durations of tests, given the seconds of a second run of the slow ones."""
    again = {}
    monkeypatch.setattr(tiers, "retry", lambda names: {name: again[name] for name in names})
    machine = json.loads(tiers.SLOW_TESTS.read_text())["machine"]

    def check(seconds, *, second=(), factor=1.0):
        again.update(second)
        path = tmp_path / "measured.json"
        path.write_text(json.dumps({"machine": machine * factor, "seconds": seconds}))
        return tiers.check(path)

    return check


def test_newly_slow_test_is_reported(measured, capsys):
    assert measured({"t::new": 0.7, SLOW: 9.0}, second={"t::new": 0.6}) == 1
    assert "t::new took 0.60 s of processor time" in capsys.readouterr().out


def test_test_slowed_by_an_import_is_not_reported(measured):
    assert measured({"t::new": 0.7}, second={"t::new": 0.1}) == 0


def test_limit_scales_with_machine_speed(measured):
    assert measured({"t::new": 0.7}, second={"t::new": 0.7}, factor=2.0) == 0


def test_fast_tier_above_its_limit_is_reported(measured, capsys):
    assert measured({f"t::test_{number}": 0.2 for number in range(3000)}) == 1
    assert "the fast tier took 600 s" in capsys.readouterr().out


def test_seconds_span_setup_to_teardown():
    recorder = tiers.DurationRecorder(None)
    for when, seconds in (("setup", 0.1), ("call", 0.3), ("teardown", 0.4)):
        report = SimpleNamespace(nodeid="t::one", when=when, processor_seconds=seconds)
        recorder.pytest_runtest_logreport(report)
    assert recorder.seconds == {"t::one": 0.4}
