"""Walks: what is shown step by step, as records that text and pages are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from markupsafe import Markup

Mark = Literal["", "own", "new", "sent", "got", "done", "wrong"]
SIGNS: Mapping[Mark, str] = {
    "": "",
    "own": "#",
    "new": "*",
    "sent": ">",
    "got": "+",
    "done": "=",
    "wrong": "!",
}
"""What stands behind a marked cell where there are no colours."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table, and how it is marked."""

    text: str
    mark: Mark = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows beneath a head."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    marks: Mapping[Mark, str] = field(default_factory=dict)
    """What each mark in it means."""
    title: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    """Amounts beside each other, one of them perhaps now."""

    title: str
    unit: str
    amounts: Sequence[tuple[str, float]]
    now: int | None = None
    """Index of the amount that belongs to the step that is shown."""

    @property
    def most(self) -> float:
        """The largest amount; 1 if there is none, since bars are drawn in shares of it."""
        return max((amount for _, amount in self.amounts), default=0) or 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step: what happens, in words, and what there is then."""

    title: str
    text: Sequence[str] = ()
    tables: Sequence[Table] = ()
    bars: Bars | None = None
    picture: Markup | None = None
    """For pages alone; whatever it shows stands in a table, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Walk:
    """All steps."""

    title: str
    about: str
    steps: Sequence[Step]
