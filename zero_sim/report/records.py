"""The tables that are not about cases: their rows as records, and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zero_sim.report.amounts import aligned


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One figure of a benchmark, with its goal."""

    name: str
    value: float
    unit: str
    goal: float | None = None
    """Goal in the same unit; None if there is none."""
    ok: bool | None = None
    """True if the goal is reached; None without a goal."""
    at_least: bool = False
    """True if the goal is a lower bound, else it is an upper bound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorseRatio:
    """A ratio of a benchmark that got worse."""

    name: str
    value: float
    before: float
    """Median of the last recorded runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """One fact about this machine."""

    name: str
    value: str
    ok: bool
    note: str = ""
    """Features that need it, and the remedy."""
    required: bool = False
    """True if nothing can run without it."""


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
