"""Runs of one suite on one backend, in processes that a test may end."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.pytorch_suites.suites import Suite

CRASH = "crash"
TIME_LIMIT = "time limit"
IMPORT = "import_error"


@dataclass(slots=True)
class ReportedStats:
    """Outcomes of the tests of one suite on one backend, by test."""

    outcomes: dict[str, str] = field(default_factory=dict)
    """`pass`, `skip`, `fail`, `crash` or `time limit`."""
    details: dict[str, str] = field(default_factory=dict)
    """Error message or output."""
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    import_error: str = ""
    """Reason why the suite could not be loaded; empty if it was."""


def run_suite(
    suite: Suite,
    backend: str,
    tests: Iterable[str] | None = None,
    *,
    limit_seconds: float,
    tell: Callable[[str, ReportedStats], None] = lambda test, told: None,
) -> ReportedStats:
    """Run tests one after another, in one process until a test ends it.

    Args:
        suite: The suite.
        backend: `baseline`, `eager` or `hostile`.
        tests: Names of tests; None for all. Unknown names get no outcome.
        limit_seconds: Time limit of a test, after which its process is killed.
        tell: Called after each test with its name and all results so far.
    """
    told, left = ReportedStats(), None if tests is None else list(tests)
    while left is None or left:
        worker = _Worker(suite, backend)
        first = worker.next_line(limit_seconds)
        if not isinstance(first, dict) or IMPORT in first:
            worker.end()
            told.import_error = worker.said() if not isinstance(first, dict) else first[IMPORT]
            break
        there = first["tests"]
        left = there if left is None else [name for name in left if name in there]
        worker.give(left)
        going_on = True
        while left and going_on:
            name = left[0]
            going_on = _note_next(told, worker, left, limit_seconds)
            tell(name, told)
        worker.end()
    return told


def _note_next(told: ReportedStats, worker: _Worker, left: list[str], limit_seconds: float) -> bool:
    """Record the outcome of the next test; True if the process is still running."""
    line, name = worker.next_line(limit_seconds), left.pop(0)
    if isinstance(line, dict):
        # The test has started.
        line = worker.next_line(limit_seconds)
    if isinstance(line, dict):
        told.outcomes[name] = line["outcome"]
        told.details[name] = line["detail"]
        told.cpu_seconds[name] = line["cpu_seconds"]
        return True
    told.outcomes[name] = line or CRASH
    told.details[name] = worker.said() if line is None else f"more than {limit_seconds:g} s"
    return False


class _Worker:
    """A process of `tests.pytorch_suites.worker`, with its output."""

    def __init__(self, suite: Suite, backend: str) -> None:
        command = [sys.executable, "-m", "tests.pytorch_suites.worker", suite.name]
        command += ["--backend", backend]
        if suite.path is not None:
            command += ["--path", str(suite.path)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            cwd=Path(__file__).parents[2],
            # The ranks of a test are its children, and end with it.
            start_new_session=True,
        )
        self._lines: queue.Queue[dict | None] = queue.Queue()
        self._said: list[str] = []
        self._readers = [
            threading.Thread(target=self._read_lines, daemon=True),
            threading.Thread(target=self._read_said, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def give(self, tests: Iterable[str]) -> None:
        """Send the names of the tests to run."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("".join(f"{name}\n" for name in tests))
            self._process.stdin.close()

    def next_line(self, limit_seconds: float) -> dict | str | None:
        """Return the next line; None if the process ended, `time limit` if no line came in time."""
        try:
            return self._lines.get(timeout=limit_seconds)
        except queue.Empty:
            return TIME_LIMIT

    def end(self) -> None:
        """Kill the process and its ranks."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for reader in self._readers:
            reader.join()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def said(self) -> str:
        """Return the last lines of its error output, and its exit status."""
        return f"exit {self._process.poll()}: " + "".join(self._said[-30:])

    def _read_lines(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(json.loads(line))
        self._lines.put(None)

    def _read_said(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._said.append(line)
            del self._said[:-100]
