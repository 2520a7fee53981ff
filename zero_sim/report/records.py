"""Rows of the tables that are not about cases."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One figure of a benchmark, beside what it should be."""

    name: str
    value: float
    unit: str
    goal: float | None = None
    """In the same unit; None where there is nothing to reach."""
    ok: bool | None = None
    """Whether the goal is reached; None without a goal."""
    at_least: bool = False
    """Whether the goal is the least that it should be, in place of the most."""

    def as_dict(self) -> dict[str, object]:
        """Everything, ready for JSON."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorseRatio:
    """A ratio of a benchmark that got worse."""

    name: str
    value: float
    before: float
    """Median of the last runs on record."""

    def as_dict(self) -> dict[str, object]:
        """Everything, ready for JSON."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """One thing found out about this machine."""

    name: str
    value: str
    ok: bool
    note: str = ""
    """What does not work without it, and what to do."""
    required: bool = False
    """Whether nothing at all can run without it."""

    def as_dict(self) -> dict[str, object]:
        """Everything, ready for JSON."""
        return dataclasses.asdict(self)
