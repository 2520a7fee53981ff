"""Tensors as tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zero_sim.report.walks import Cell, Mark, Table
from zero_sim.walkthrough import prose
from zero_sim.workloads.transformer import SHAPES

FLAT_COLUMNS = 10
"""Elements per table row. It divides 130, the shard boundary, so that no row has two owners."""

MarkOf = Callable[[int], Mark]
"""Maps an element's position to its mark."""


def number(value: float, *, digits: int = 4) -> str:
    """Return a value with significant digits; four distinguish all bf16 values."""
    return f"{value:.{digits}g}"


def cells(values: Tensor, *, mark: Mark = "", digits: int = 4) -> list[Cell]:
    """Return a row of cells.

    Args:
        values: Shape (columns,), any dtype.
        mark: Mark for all cells.
        digits: Significant digits; see `number`.
    """
    return [Cell(number(value, digits=digits), mark) for value in values.float().tolist()]


def matrix(values: Tensor, *, title: str, row: str = "token", mark: Mark = "") -> Table:
    """Return a matrix as a table.

    Args:
        values: Shape (rows, columns).
        title: Table title.
        row: Word before the index in row names.
        mark: Mark for all cells.
    """
    rows = [[f"{row} {index}", *cells(each, mark=mark)] for index, each in enumerate(values)]
    return Table(head=columns(values.shape[1]), rows=rows, title=title)


def by_head(values: Tensor, *, title: str, row: str = "token") -> Table:
    """Return all attention heads' matrices side by side.

    Args:
        values: Shape (heads, rows, columns).
        title: Table title.
        row: Word before the index in row names.
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
        title: Table title.
        mark_of: Returns the mark for an element.
        digits: Significant digits; see `number`.
    """
    found = [number(value, digits=digits) for value in values.float().tolist()]
    marked = [Cell(text, mark_of(index)) for index, text in enumerate(found)]
    rows: list[Sequence[Cell | str]] = []
    # Each row shows its span and params, because it may contain parts of several params.
    for start in range(0, len(marked), FLAT_COLUMNS):
        stop = min(start + FLAT_COLUMNS, len(marked))
        rows.append([f"[{start}, {stop})", _params(start, stop), *marked[start:stop]])
    head = ["elements", "of", *map(str, range(FLAT_COLUMNS))]
    return prose.table(entry, rows, head=head, title=title)


def by_param(entry: str, values: Tensor, *, title: str, mark_of: MarkOf) -> Table:
    """Return a flat buffer with a table row for each param row.

    Args:
        entry: Table in `prose.toml` with the marks.
        values: Shape (elements,).
        title: Table title.
        mark_of: Returns the mark for an element.
    """
    rows: list[Sequence[Cell | str]] = []
    offset, widest = 0, max(shape[-1] for shape in SHAPES.values())
    found = [number(value) for value in values.float().tolist()]
    for name, shape in SHAPES.items():
        for index in range(shape[0] if len(shape) == 2 else 1):
            stop = offset + shape[-1]
            label = f"{name}[{index}]" if len(shape) == 2 else name
            # Fill rows of narrow params with empty cells.
            row = [Cell(found[at], mark_of(at)) for at in range(offset, stop)]
            rows.append([label, *row, *[""] * (widest - len(row))])
            offset = stop
    return prose.table(entry, rows, head=columns(widest), title=title)


def columns(count: int) -> list[str]:
    """Return a table heading: an empty cell above the row names, then column numbers."""
    return ["", *map(str, range(count))]


def _params(start: int, stop: int) -> str:
    """Return the params in a span: the first, an ellipsis, the last."""
    names = [name for name, shape in SHAPES.items() for _ in range(torch.Size(shape).numel())]
    # dict.fromkeys drops repeated names and keeps their order.
    first, *others = dict.fromkeys(names[start:stop])
    return ", ".join([first, *(["..."] if others[:-1] else []), *others[-1:]])
