"""Tables of `doctor` and `bench`: rows as records, and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zero_sim.report.amounts import aligned


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """A benchmark's figure, with its goal."""

    name: str
    value: float
    unit: str
    goal: float | None = None
    """Goal in the same unit, if any."""
    ok: bool | None = None
    """True if the goal is reached; None without a goal."""
    at_least: bool = False
    """True if the goal is a lower bound, False for an upper bound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorseRatio:
    """A benchmark's ratio that got worse."""

    name: str
    value: float
    before: float
    """Median of the last recorded runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """A fact about this machine, such as a version."""

    name: str
    value: str
    ok: bool
    note: str = ""
    """Features that need it, and the remedy."""
    required: bool = False
    """True if zero_sim cannot run without it."""


def render_facts(facts: Sequence[Fact]) -> str:
    """Return the table of `zero-sim doctor`."""
    rows = [("ok" if fact.ok else "NO", fact.name, fact.value, fact.note) for fact in facts]
    return aligned(rows, words=range(4))


def render_measurements(measurements: Sequence[Measurement]) -> str:
    """Return the table of `zero-sim bench`."""
    rows = [
        (
            {True: "ok", False: "MISS", None: ""}[row.ok],
            row.name,
            f"{row.value:,.4g} {row.unit}".rstrip(),
            "" if row.goal is None else f"goal {_goal(row)}",
        )
        for row in measurements
    ]
    return aligned(rows, words=range(4))


def render_worse(found: Sequence[WorseRatio]) -> str:
    """Return a line for each ratio that got worse."""
    rows = [
        ("WORSE", one.name, f"{one.value:,.4g} x", f"{one.before:,.4g} x before") for one in found
    ]
    return aligned(rows, words=range(4))


def _goal(row: Measurement) -> str:
    side = "at least" if row.at_least else "at most"
    return f"{side} {row.goal:,.4g} {row.unit}".rstrip()
