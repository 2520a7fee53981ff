"""Walkthroughs: step-by-step explanations as records, text and HTML pages.

A page is self-contained, shows one step at a time and reacts to keys. Without scripts, it shows all
steps in a column.
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
from zero_sim.report.amounts import aligned
from zero_sim.report.area_chart import Chart, draw_area, render_bars
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
"""Sign after a marked cell in text, in place of a colour."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A table cell with its mark."""

    text: str
    mark: Mark = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table with a heading row."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    marks: Mapping[Mark, str] = field(default_factory=dict)
    """Meaning by mark."""
    title: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A step: its explanation, and the values after it."""

    title: str
    text: Sequence[str] = ()
    tables: Sequence[Table] = ()
    chart: Chart | None = None
    picture: Markup | None = None
    """Only for pages. In text, a table shows the same values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Walk:
    """A walkthrough."""

    title: str
    about: str
    steps: Sequence[Step]


def render_walk(walk: Walk) -> str:
    """Render a walkthrough as text."""
    # Underlined headings, so that the text is valid Markdown.
    lines = [walk.title, "=" * len(walk.title), "", walk.about]
    drawn: list[Chart | None] = []
    for number, step in enumerate(walk.steps, start=1):
        lines += ["", f"{number}. {step.title}", "-" * (len(str(number)) + 2 + len(step.title))]
        lines += _step(step)
        # In text, print charts that only differ by their marker once.
        chart = None if step.chart is None else replace(step.chart, now=None)
        if chart is not None and chart not in drawn:
            drawn.append(chart)
            lines += ["", *render_bars(chart)]
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
        yield ", ".join(f"{SIGNS[mark]} {meaning}" for mark, meaning in table.marks.items())


def _text(cell: Cell | str) -> str:
    # Without colours, a sign after the value shows its mark.
    return cell if isinstance(cell, str) else f"{cell.text}{SIGNS[cell.mark]}"


def write_walk(path: Path, walk: Walk) -> None:
    """Write a walkthrough as a page; an existing file is replaced.

    Raises:
        UsageError: If the file cannot be written.
        EnvironmentProblem: If the disk is full.
    """
    pages.write_page(path, render_walk_page(walk))


def render_walk_page(walk: Walk) -> str:
    """Render a walkthrough as a page."""
    # The content security policy only allows a script with this hash, so no injected script runs.
    script = hashlib.sha256(pages.asset("walk.js").encode()).digest()
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{base64.b64encode(script).decode()}'"
    )
    return str(
        pages.render("walk.html", title=walk.title, policy=policy, walk=walk, draw_area=draw_area)
    )
