"""Walkthroughs: explanations step by step, as records, text and HTML pages.

A page is self-contained, shows one step at a time and reacts to keys. Without scripts, it shows all
steps below each other. Its policy allows one script, by hash.
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
"""Sign after a marked cell in text, in place of its colour."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table with its mark."""

    text: str
    mark: Mark = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table with a heading row."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    marks: Mapping[Mark, str] = field(default_factory=dict)
    """Meaning of each mark in the table."""
    title: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    """Amounts as a bar chart, with the current one marked."""

    title: str
    unit: str
    amounts: Sequence[tuple[str, float]]
    now: int | None = None
    """Index of the amount of the current step; None if there is none."""

    @property
    def most(self) -> float:
        """Largest amount; 1 if all are 0, because bars are drawn in shares of it."""
        return max((amount for _, amount in self.amounts), default=0) or 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step: an explanation and the values after it."""

    title: str
    text: Sequence[str] = ()
    tables: Sequence[Table] = ()
    bars: Bars | None = None
    picture: Markup | None = None
    """Only for pages. A table contains the same values for the text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Walk:
    """A walkthrough."""

    title: str
    about: str
    steps: Sequence[Step]


def render_walk(walk: Walk) -> str:
    """Return a walkthrough as text."""
    lines = [walk.title, "=" * len(walk.title), "", walk.about]
    # Heading underlined, as in Markdown, so that the text is also a document.
    drawn: list[Bars | None] = []
    for number, step in enumerate(walk.steps, start=1):
        lines += ["", f"{number}. {step.title}", "-" * (len(str(number)) + 2 + len(step.title))]
        lines += _step(step)
        # Print equal bars once, even if their current amounts differ.
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
    # Without colours, a sign after the value shows its mark.
    return cell if isinstance(cell, str) else f"{cell.text}{SIGNS[cell.mark]}"


def _bars(bars: Bars) -> Iterator[str]:
    yield f"{bars.title}, in {bars.unit}"
    rows = [[name, bar(amount / bars.most), f"{amount:,.0f}"] for name, amount in bars.amounts]
    yield from aligned(rows, words=range(2)).splitlines()


def write_walk(path: Path, walk: Walk) -> None:
    """Write a walkthrough as a page; an existing file is replaced.

    Raises:
        UsageError: The file cannot be written.
        EnvironmentProblem: The disk is full.
    """
    pages.write_page(path, render_walk_page(walk))


def render_walk_page(walk: Walk) -> str:
    """Return the page as text."""
    # The policy contains the hash of our script, so that injected scripts do not run.
    script = hashlib.sha256(pages.asset("walk.js").encode()).digest()
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{base64.b64encode(script).decode()}'"
    )
    return str(pages.render("walk.html", title=walk.title, policy=policy, walk=walk))
