"""Run tests of one suite on one backend, and print each outcome as a line of JSON.

The process prints the names of all tests, then reads the names of those to run, one per line. It
prints `{"started": name}` before each test and its outcome after it. If the process ends in
between, that test ended it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
import unittest
import warnings
from pathlib import Path
from typing import Any, TextIO

from tests.pytorch_suites import suites

BASELINE = "baseline"
BACKENDS = (BASELINE, "eager", "hostile")


def main() -> None:
    """Run the tests given on the command line and standard input."""
    parser = argparse.ArgumentParser()
    parser.add_argument("suite")
    parser.add_argument("--path", type=Path)
    parser.add_argument("--backend", choices=BACKENDS, required=True)
    arguments = parser.parse_args()
    suites.prepare_process()
    told = _open_told()
    warnings.simplefilter("ignore")
    suite = suites.Suite(arguments.suite, arguments.path)
    try:
        tests = _load(suite, arguments.backend)
    except Exception:  # noqa: BLE001  Any error of a foreign file is its outcome.
        _tell(told, import_error=traceback.format_exc())
        return
    _tell(told, tests=sorted(tests))
    for line in sys.stdin:
        name = line.strip()
        _tell(told, started=name)
        before = sum(os.times()[:4])
        outcome, detail = run_one(tests[name], arguments.backend)
        seconds = sum(os.times()[:4]) - before
        _tell(told, test=name, outcome=outcome, detail=detail, cpu_seconds=round(seconds, 2))


def _open_told() -> TextIO:
    """Duplicate standard output, and send all later prints of tests to standard error."""
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return told


def _tell(told: TextIO, **fields: Any) -> None:
    print(json.dumps(fields), file=told, flush=True)


def _load(suite: suites.Suite, backend: str) -> dict[str, unittest.TestCase]:
    from tests.pytorch_suites import shim

    if backend == BASELINE:
        shim.fork_ranks()
    else:
        shim.simulate_ranks(backend, strict=not suite.is_of_gloo)
    if suite.for_gpus:
        shim.put_cpus_for_gpus()
    if suite.name == suites.INSTALLED and backend != BASELINE:
        shim.adapt_installed_suite()
    return suites.load_tests(suite)


def run_one(test: unittest.TestCase, backend: str) -> tuple[str, str]:
    """Run a test; return `pass`, `skip` or `fail`, and the error message or reason."""
    from tests.pytorch_suites import shim

    def run(rank: int = 0) -> unittest.TestResult:
        result = unittest.TestResult()
        unittest.TestSuite([test]).run(result)
        return result

    if backend == BASELINE or shim.starts_ranks(test):
        result = run()
    else:
        (result,) = shim.run_ranks(1, run, timing=backend)
    raised = [text for _, text in (*result.errors, *result.failures)]
    if raised:
        return "fail", "\n".join(raised)
    if result.unexpectedSuccesses:
        return "fail", "expected to fail"
    if result.skipped:
        return "skip", result.skipped[0][1]
    return "pass", ""


if __name__ == "__main__":
    main()
