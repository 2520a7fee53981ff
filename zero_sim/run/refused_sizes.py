"""Sizes that a system itself refuses: a limit of the system, not a fault."""

from __future__ import annotations

import re
from pathlib import Path

from zero_sim.findings.records import CaseResult
from zero_sim.host.frames import is_of_user
from zero_sim.scenario.checks import Check

_RAISED = re.compile(r"rank \d+ raised (AssertionError|ValueError|NotImplementedError)\b")
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in .+\n(?:    (.+)\n)?', re.MULTILINE)
# `assert hidden % heads == 0`.
_REMAINDER = re.compile(r"^assert\b.*%")
_DIVISIBLE = re.compile(r"\b(in)?divisib|\bmultiples? of\b|\bdivides? evenly\b|\bevenly divid")


def refused_size(result: CaseResult) -> str:
    """Return the system's check that refused a case's sizes; empty if none did.

    An error counts as a refusal if the system's code raised it, by an `assert` with a remainder or
    with a message about divisibility.
    """
    first = result.findings[0] if result.findings else None
    if first is None or first.check != Check.WORLD_RANK_FAILED:
        return ""
    raised, frames = _RAISED.match(first.message), _FRAME.findall(f"{first.detail}\n")
    # Other exceptions, such as IndexError, are faults even if a size causes them.
    if raised is None or not frames:
        return ""
    # The innermost frame raised the error.
    file, line, statement = frames[-1]
    wording = first.message[raised.end() :].lstrip(": ")
    # torch's own checks do not count, because a system must not pass sizes that torch refuses.
    is_theirs = is_of_user(file) and "torch" not in Path(file).parts
    if not is_theirs or not (_REMAINDER.match(statement) or _DIVISIBLE.search(wording)):
        return ""
    # Prefer the statement, because the message may contain this case's numbers.
    return f"{raised[1]} at {Path(file).name}:{line}: {statement or wording}"
