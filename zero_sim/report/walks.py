"""Walks: explanations step by step, as records, as text and as pages.

A page stands alone, shows a step at a time, and takes keys; without a script, all steps are there,
one below the other. It allows its one script by its hash and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from markupsafe import Markup

from zero_sim.report import pages
from zero_sim.report.amounts import aligned, bar
from zero_sim.untrusted import printable

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
"""Sign after a marked cell in text, which has no colours."""


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
    """Meaning of each mark in the table."""
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


def render_walk(walk: Walk) -> str:
    """All of a walk as text."""
    lines = [walk.title, "=" * len(walk.title), "", walk.about]
    drawn: list[Bars | None] = []
    for number, step in enumerate(walk.steps, start=1):
        lines += ["", f"{number}. {step.title}", "-" * (len(str(number)) + 2 + len(step.title))]
        lines += _step(step)
        # Where only what is now differs, bars stand once.
        bars = None if step.bars is None else replace(step.bars, now=None)
        if bars is not None and bars not in drawn:
            drawn.append(bars)
            lines += ["", *_bars(bars)]
    return printable("\n".join(lines), lines=True)


def _step(step: Step) -> Iterator[str]:
    yield from step.text
    for table in step.tables:
        yield ""
        yield from _table(table)


def _table(table: Table) -> Iterator[str]:
    if table.title:
        yield table.title
    rows = [list(table.head), *([_text(cell) for cell in row] for row in table.rows)]
    yield from aligned(rows).splitlines()
    if table.marks:
        yield ", ".join(f"{SIGNS[mark]} {said}" for mark, said in table.marks.items())


def _text(cell: Cell | str) -> str:
    return cell if isinstance(cell, str) else f"{cell.text}{SIGNS[cell.mark]}"


def _bars(bars: Bars) -> Iterator[str]:
    yield f"{bars.title}, in {bars.unit}"
    rows = [[name, bar(amount / bars.most), f"{amount:,.0f}"] for name, amount in bars.amounts]
    yield from aligned(rows, words=range(2)).splitlines()


def write_walk(path: Path, walk: Walk) -> None:
    """Write a walk's page; one that is there is replaced.

    Raises:
        UsageError: It cannot be written there.
        EnvironmentProblem: There is no room for it.
    """
    pages.write_page(path, render_walk_page(walk))


def render_walk_page(walk: Walk) -> str:
    """The page as text."""
    script = hashlib.sha256(pages.asset("walk.js").encode()).digest()
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{base64.b64encode(script).decode()}'"
    )
    return str(pages.render("walk.html", title=walk.title, policy=policy, walk=walk))
