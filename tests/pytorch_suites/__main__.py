"""Run PyTorch's suites on the baseline and on simulated ranks, and compare with the record.

The multi-rank tests come from the installed torch and from a checkout of its source, and run
unmodified. Exits 1 if a test that passed on simulated ranks no longer does, or differs from the
baseline without a recorded reason.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.pytorch_suites import outcomes
from tests.pytorch_suites.outcomes import Outcome, Record
from tests.pytorch_suites.running import ReportedStats, run_suite
from tests.pytorch_suites.suites import Suite, find_suites
from tests.pytorch_suites.worker import BACKENDS, BASELINE


def main() -> int:
    """Run the suites given on the command line, and return the exit status."""
    options = _parser().parse_args()
    if options.source is not None and str(options.source) in ("", "."):
        options.source = None
    try:
        chosen = [
            suite
            for suite in find_suites(options.source)
            if not options.suite or suite.name in options.suite
        ]
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    if not chosen:
        print(f"expected a suite that there is, got {options.suite}", file=sys.stderr)
        return 2
    known = outcomes.read_record()
    seen: dict[str, dict[str, Outcome]] = {}
    with ThreadPoolExecutor(options.jobs) as pool:
        for suite, tests in pool.map(lambda suite: (suite, _run(suite, known, options)), chosen):
            seen[suite.name] = outcomes.with_reasons(tests, known.suites.get(suite.name, {}))
    print("\n".join(outcomes.table(seen)))
    losses = outcomes.find_losses(seen, known.suites)
    if gains := outcomes.find_gains(seen, known.suites):
        print("\nPass and are on record as differing; --write notes it:", *gains, sep="\n  ")
    if losses:
        print("\nWorse than the record:", *losses, sep="\n  ")
    if options.write:
        known.suites.update(seen)
        known.torch = importlib.metadata.version("torch")
        known.source = _version(options.source) or known.source
        outcomes.write_record(known)
        print(f"\nNoted in {outcomes.RECORD}")
    return 1 if losses else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.pytorch_suites", description=__doc__)
    parser.add_argument("--source", type=Path, help="a checkout of PyTorch's source")
    parser.add_argument("--suite", action="append", help="only this one; may be given again")
    parser.add_argument("--write", action="store_true", help="note the outcomes in the record")
    parser.add_argument(
        "--simulated-only", action="store_true", help="take the baseline from the record"
    )
    parser.add_argument("--jobs", type=int, default=1, help="suites at once")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for each test")
    parser.add_argument("--details", action="store_true", help="say what each failure raised")
    return parser


def _run(suite: Suite, known: Record, options: argparse.Namespace) -> dict[str, Outcome]:
    """Run a suite and print progress; return its outcomes, empty if it cannot be loaded."""
    recorded = known.suites.get(suite.name, {}) if options.simulated_only else {}
    told: dict[str, Mapping[str, str]] = {}
    names = None
    if recorded:
        told[BASELINE] = {test: outcome.baseline for test, outcome in recorded.items()}
        names = [test for test, outcome in recorded.items() if outcome.baseline == outcomes.PASS]
    for backend in BACKENDS:
        if backend in told:
            continue
        tell = functools.partial(_say_one, suite, backend) if options.details else _say_nothing
        came = run_suite(suite, backend, names, limit_seconds=options.limit, tell=tell)
        if came.import_error:
            _say(f"{suite.name} {backend}: cannot be loaded: {came.import_error.strip()}")
            return {}
        told[backend] = came.outcomes
        _say_how(suite, backend, came)
        if backend == BASELINE:
            passed = came.outcomes.items()
            names = [test for test, outcome in passed if outcome == outcomes.PASS]
    return {
        test: Outcome(baseline, told["eager"].get(test, ""), told["hostile"].get(test, ""))
        for test, baseline in told[BASELINE].items()
        if baseline != outcomes.SKIP
    }


def _say_how(suite: Suite, backend: str, came: ReportedStats) -> None:
    passed = sum(outcome == outcomes.PASS for outcome in came.outcomes.values())
    seconds = sum(came.cpu_seconds.values())
    _say(f"{suite.name} {backend}: {passed} of {len(came.outcomes)} pass, {seconds:.0f} CPU s")


def _say_one(suite: Suite, backend: str, test: str, came: ReportedStats) -> None:
    outcome = came.outcomes[test]
    _say(f"# {suite.name} {backend} {test}: {outcome}, {came.cpu_seconds.get(test, 0)} CPU s")
    if outcome not in (outcomes.PASS, outcomes.SKIP):
        _say(came.details.get(test, ""))


def _say_nothing(test: str, came: ReportedStats) -> None:
    pass


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _version(source: Path | None) -> str:
    file = source / "version.txt" if source is not None else None
    return file.read_text().strip() if file is not None and file.exists() else ""


if __name__ == "__main__":
    sys.exit(main())
