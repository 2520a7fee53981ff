"""Processor time, of this process and of all that it started: what a busy machine does not change.

The wall clock tells how much else runs. A ratio is taken of two things that are done in turns, so
that what slows the machine down slows both.
"""

from __future__ import annotations

import os
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path

Work = Callable[[], object]


def tree_seconds() -> float:
    """Processor seconds of this process and of all that it started, living or reaped."""
    reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = time.process_time() + reaped.ru_utime + reaped.ru_stime
    return own + sum(map(_process_seconds, _descendants(os.getpid())))


def median_seconds(work: Work, repeats: int) -> float:
    """Median processor seconds of a piece of work in this process."""
    return statistics.median(_seconds(work) for _ in range(repeats))


def pairs(one: Work, other: Work, repeats: int) -> list[tuple[float, float]]:
    """Processor seconds of two pieces of work, done in turns; all processes of this one counted."""
    taken = []
    for _ in range(repeats):
        began = tree_seconds()
        one()
        between = tree_seconds()
        other()
        taken.append((between - began, tree_seconds() - between))
    return taken


def ratio(taken: list[tuple[float, float]]) -> float:
    """How often the second of each pair fits into the first: the median."""
    return statistics.median(first / second for first, second in taken)


def _seconds(work: Work) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _descendants(pid: int) -> list[int]:
    """Processes that a process started, and that those did; Linux."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # The name of the process, in parentheses, may hold anything.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # It ended meanwhile.
        children.setdefault(int(fields[1]), []).append(int(folder.name))
    found, waiting = [], [pid]
    while waiting:
        waiting_now = children.get(waiting.pop(), [])
        found += waiting_now
        waiting += waiting_now
    return found


def _process_seconds(pid: int) -> float:
    """Processor seconds of all threads of a process so far, to the nanosecond; 0 once it ended."""
    nanoseconds = 0
    for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            nanoseconds += int(task.read_text().split()[0])
        except (OSError, IndexError):
            continue  # The thread ended meanwhile.
    return nanoseconds / 1e9
