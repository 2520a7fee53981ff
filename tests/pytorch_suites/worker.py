"""A process that runs tests of one suite on one backend and tells each outcome on a line.

It tells the names of all, and is then given those that it is to run, a line each. It tells
`{"started": name}` before each test, and its outcome after it: a process that ends in between was
ended by that test.
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
    """Run what the arguments say."""
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
    except Exception:  # noqa: BLE001  Whatever a file of somebody else raises is its outcome.
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
    """The output as it was; whatever a test prints from now on goes to the error output."""
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
    """Run a test; its outcome, `pass`, `skip` or `fail`, and what was raised or said."""
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
