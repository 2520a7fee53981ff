"""Tensors as tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zero_sim.report.walks import Cell, Mark, Table
from zero_sim.walkthrough import prose
from zero_sim.workloads.transformer import SHAPES

FLAT_COLUMNS = 10
"""Elements in a table row. It divides 130, the boundary of the shards, so no row has two owners."""

MarkOf = Callable[[int], Mark]
"""Maps an element's position to its mark."""


def number(value: float, *, digits: int = 4) -> str:
    """Return a value with a number of significant digits; four distinguish all bf16 values."""
    return f"{value:.{digits}g}"


def cells(values: Tensor, *, mark: Mark = "", digits: int = 4) -> list[Cell]:
    """Return the cells of a row.

    Args:
        values: Shape (columns,), any dtype.
        mark: Mark of all cells.
        digits: Significant digits; see `number`.
    """
    return [Cell(number(value, digits=digits), mark) for value in values.float().tolist()]


def matrix(values: Tensor, *, title: str, row: str = "token", mark: Mark = "") -> Table:
    """Return a matrix as a table.

    Args:
        values: Shape (rows, columns).
        title: Title of the table.
        row: Name of a row.
        mark: Mark of all cells.
    """
    rows = [[f"{row} {index}", *cells(each, mark=mark)] for index, each in enumerate(values)]
    return Table(head=columns(values.shape[1]), rows=rows, title=title)


def by_head(values: Tensor, *, title: str, row: str = "token") -> Table:
    """Return the matrices of all attention heads side by side.

    Args:
        values: Shape (heads, rows, columns).
        title: Title of the table.
        row: Name of a row.
    """
    heads, count, width = values.shape  # [heads, rows, columns]
    rows = [
        [f"{row} {index}", *(cell for head in range(heads) for cell in cells(values[head, index]))]
        for index in range(count)
    ]
    head = ["", *(f"head {head}: {column}" for head in range(heads) for column in range(width))]
    return Table(head=head, rows=rows, title=title)


def flat(entry: str, values: Tensor, *, title: str, mark_of: MarkOf, digits: int = 4) -> Table:
    """Return a flat buffer as a table.

    Args:
        entry: Table in `prose.toml` with the marks.
        values: Shape (elements,).
        title: Title of the table.
        mark_of: Returns the mark of an element.
        digits: Significant digits; see `number`.
    """
    found = [number(value, digits=digits) for value in values.float().tolist()]
    marked = [Cell(text, mark_of(index)) for index, text in enumerate(found)]
    rows: list[Sequence[Cell | str]] = []
    # Each row shows its span and params, because it may contain the end of one and the next.
    for start in range(0, len(marked), FLAT_COLUMNS):
        stop = min(start + FLAT_COLUMNS, len(marked))
        rows.append([f"[{start}, {stop})", _params(start, stop), *marked[start:stop]])
    head = ["elements", "of", *map(str, range(FLAT_COLUMNS))]
    return prose.table(entry, rows, head=head, title=title)


def by_param(entry: str, values: Tensor, *, title: str, mark_of: MarkOf) -> Table:
    """Return a flat buffer with a table row for each row of a param.

    Args:
        entry: Table in `prose.toml` with the marks.
        values: Shape (elements,).
        title: Title of the table.
        mark_of: Returns the mark of an element.
    """
    rows: list[Sequence[Cell | str]] = []
    offset, widest = 0, max(shape[-1] for shape in SHAPES.values())
    found = [number(value) for value in values.float().tolist()]
    for name, shape in SHAPES.items():
        for index in range(shape[0] if len(shape) == 2 else 1):
            stop = offset + shape[-1]
            label = f"{name}[{index}]" if len(shape) == 2 else name
            # Narrow params are padded with empty cells to the widest one.
            row = [Cell(found[at], mark_of(at)) for at in range(offset, stop)]
            rows.append([label, *row, *[""] * (widest - len(row))])
            offset = stop
    return prose.table(entry, rows, head=columns(widest), title=title)


def columns(count: int) -> list[str]:
    """Return the heading of a table with a column of row names and numbered columns."""
    return ["", *map(str, range(count))]


def _params(start: int, stop: int) -> str:
    """Return the params of a span: the first, an ellipsis, the last."""
    names = [name for name, shape in SHAPES.items() for _ in range(torch.Size(shape).numel())]
    first, *others = dict.fromkeys(names[start:stop])
    return ", ".join([first, *(["..."] if others[:-1] else []), *others[-1:]])
