"""Tiers of tests: fast ones for every change, all tests each night.

A test is slow if it was measured above FAST_SECONDS of processor time; `slow_tests.json` lists
these with their seconds, and collection marks them `slow`. KEPT_FAST lists tests that run on every
change although they take longer, because nothing faster fails when the code they guard breaks.

    pytest --durations-to measured.json        measure while running
    python -m tests.tiers record measured.json rewrite slow_tests.json
    python -m tests.tiers check measured.json  fail if a test outgrew its tier

Processor time includes set-up, teardown and child processes that the test waited for. The first
test that needs a slow import pays for it, so new slow tests are run twice more in one process
before they are recorded or reported.
"""

from __future__ import annotations

import fnmatch
import json
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

FAST_SECONDS = 0.25
OUTGROWN_FACTOR = 2.0
"""A fast test may take this many times FAST_SECONDS before the nightly run fails.

Processor time of one test varies by a third between runs; recording again costs an hour.
"""
FAST_TIER_SECONDS = 450.0
LONGEST_RETRIED_SECONDS = 10.0
"""No import takes longer, so a test above this is slow without a second run."""

SLOW_TESTS = Path(__file__).with_name("slow_tests.json")
ROOT = Path(__file__).resolve().parents[1]

_LEDGER = "test_ledgers_of_shipped_scenarios_match_closed_forms"
KEPT_FAST = {
    "tests/test_budgets.py::*": "a refactoring is to see its figures at once",
    "tests/test_tidy.py::*": "rules of the house, over all modules",
    "tests/test_words.py::*": "rules of the house, over all modules",
    "tests/test_readme.py::*": "every command of the README, end to end",
    "tests/site/*": "every page of the documentation in a browser",
    "tests/packaging/test_wheel.py::*": "the wheel by itself, as users get it",
    "tests/mutants/test_catalogue.py::*": "every mutant still fits the code",
    "tests/mutants/test_smallest.py::*": "every mutant is found by its smallest case",
    "property_tests/quality/test_sentinels.py::*": "drawn cases find a mutant of each class",
    "property_tests/test_features.py::*": "drawn combinations of all features, 25 of each property",
    "property_tests/test_families.py::*zero_sim]": "families of drawn cases, 25 of our own system",
    f"property_tests/test_ledgers.py::{_LEDGER}[[]smoke/*": "measured calls and bytes",
    "tests/run/real/test_ranks.py::test_a_wrong_element_is_found*[[]plain]": "a case on gloo",
    "tests/run/real/test_ranks.py::test_dead_worker_costs_one_case": "death of a process",
    "tests/backends/test_team.py::test_a_worker_that_dies_is_named*": "death of a process",
    "tests/against/test_traps.py::test_correct_script_is_equal": "a script judged by itself",
    "tests/against/test_traps.py::test_unreduced_gradients_are_different*": "a script with a fault",
    "tests/examples/*::test_system_passes_drawn_cases*": "the example systems stay right",
    "tests/run/real/test_nccl.py::test_avg_is_nccls_own_where_it*": "a case on the stand-in device",
}
"""Patterns of node ids, each with the reason why it runs on every change."""


def read_slow_tests(path: Path = SLOW_TESTS) -> dict[str, float]:
    """Return processor seconds of every slow test, by node id."""
    return json.loads(path.read_text())["seconds"]


def is_kept_fast(node_id: str) -> bool:
    """Return True if a test runs on every change, however slow."""
    return any(fnmatch.fnmatchcase(node_id, pattern) for pattern in KEPT_FAST)


def measure_machine() -> float:
    """Return processor seconds of a fixed loop, so that durations of two machines compare."""
    best = float("inf")
    for _ in range(5):
        before = time.process_time()
        total = 0
        for number in range(2_000_000):
            total += number & 7
        best = min(best, time.process_time() - before)
    return best


def _spent_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class DurationRecorder:
    """Recorder of the processor seconds of every test in a run."""

    def __init__(self, path: Path | None) -> None:
        self.seconds: dict[str, float] = {}
        self._path = path
        self._began = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Note when a test begins."""
        self._began = _spent_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
        """Attach the seconds since the test began; xdist sends them along with the report."""
        report = yield
        report.processor_seconds = _spent_seconds() - self._began
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the seconds at teardown, which include set-up and call."""
        if report.when == "teardown":
            self.seconds[report.nodeid] = report.processor_seconds

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the seconds of all tests, from the process that has every worker's reports."""
        if self._path is not None and not hasattr(session.config, "workerinput"):
            measured = {"machine": measure_machine(), "seconds": self.seconds}
            self._path.write_text(json.dumps(measured, indent=0, sort_keys=True) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that measures a run."""
    parser.addoption(
        "--durations-to",
        type=Path,
        metavar="FILE",
        help="Write the processor seconds of each test to FILE, for `python -m tests.tiers`.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker, and measure if the command line requests it."""
    config.addinivalue_line("markers", "slow: above 0.25 s of processor time; see tests/tiers.py")
    path = config.getoption("--durations-to")
    if path is not None:
        config.pluginmanager.register(DurationRecorder(path), "durations-to")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the slow tests."""
    slow = read_slow_tests()
    for item in items:
        if item.nodeid in slow and not is_kept_fast(item.nodeid):
            item.add_marker(pytest.mark.slow)


def retry(node_ids: list[str]) -> dict[str, float]:
    """Return processor seconds of tests in a process that has already imported their modules."""
    recorder = DurationRecorder(None)
    for _ in range(2):
        pytest.main(["-q", "-p", "no:xdist", *node_ids], plugins=[recorder])
    return recorder.seconds


def _new_slow(measured: dict[str, float], limit: float) -> dict[str, float]:
    """Return unrecorded tests above a limit, confirmed by a second run."""
    known = read_slow_tests()
    above = {
        node_id: seconds
        for node_id, seconds in measured.items()
        if seconds > limit and node_id not in known and not is_kept_fast(node_id)
    }
    doubtful = [name for name, seconds in above.items() if seconds < LONGEST_RETRIED_SECONDS]
    if doubtful:
        again = retry(doubtful)
        above |= {name: min(above[name], again.get(name, 0.0)) for name in doubtful}
    return {name: seconds for name, seconds in above.items() if seconds > limit}


def record(measured_path: Path) -> int:
    """Rewrite the list of slow tests from a measured run of all tests."""
    measured = json.loads(measured_path.read_text())
    seconds = measured["seconds"]
    known = {name: seconds[name] for name in read_slow_tests() if name in seconds}
    slow = {name: spent for name, spent in known.items() if spent > FAST_SECONDS}
    slow |= _new_slow(seconds, FAST_SECONDS)
    kept = {name: spent for name, spent in seconds.items() if is_kept_fast(name)}
    slow |= {name: spent for name, spent in kept.items() if spent > FAST_SECONDS}
    table = {name: round(spent, 2) for name, spent in sorted(slow.items())}
    text = json.dumps({"machine": round(measured["machine"], 4), "seconds": table}, indent=1)
    SLOW_TESTS.write_text(text + "\n")
    print(f"{len(table)} of {len(seconds)} tests are above {FAST_SECONDS} s")
    return 0


def check(measured_path: Path) -> int:
    """Report tests that outgrew the fast tier, and a fast tier that grew too long.

    Returns:
        Exit status: 1 if there is anything to report.
    """
    measured = json.loads(measured_path.read_text())
    scale = measured["machine"] / json.loads(SLOW_TESTS.read_text())["machine"]
    outgrown = _new_slow(measured["seconds"], FAST_SECONDS * OUTGROWN_FACTOR * scale)
    for name, seconds in sorted(outgrown.items(), key=lambda each: -each[1]):
        print(f"{name} took {seconds:.2f} s of processor time, above {FAST_SECONDS} s")
    if outgrown:
        print("Make these tests faster, or run `python -m tests.tiers record` on this measurement.")
    slow = read_slow_tests()
    fast = sum(
        seconds
        for name, seconds in measured["seconds"].items()
        if name not in slow or is_kept_fast(name)
    )
    limit = FAST_TIER_SECONDS * scale
    print(f"the fast tier took {fast:.0f} s of processor time, of at most {limit:.0f} s here")
    return int(bool(outgrown) or fast > limit)


if __name__ == "__main__":
    commands = {"record": record, "check": check}
    if len(sys.argv) != 3 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    sys.exit(commands[sys.argv[1]](Path(sys.argv[2])))
