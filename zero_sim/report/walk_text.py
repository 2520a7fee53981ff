"""Walks in the terminal: every step after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from zero_sim.report.amounts import aligned
from zero_sim.report.costs import BAR_CHARS
from zero_sim.report.walks import SIGNS, Bars, Cell, Step, Table, Walk
from zero_sim.untrusted import printable


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
    rows = [
        [
            name,
            f"{'█' * max(1, round(amount / bars.most * BAR_CHARS)):<{BAR_CHARS}}",
            f"{amount:,.0f}",
        ]
        for name, amount in bars.amounts
    ]
    yield from aligned(rows, left=2).splitlines()
