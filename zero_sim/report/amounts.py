"""Readable amounts: bytes in decimal (GB) and binary units (GiB), bars and tables."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

# Fixed, so that output in logs and documents does not depend on a terminal.
BAR_CHARS = 40
"""Characters of a full bar."""
# Unit, its size, and the smallest amount to report in it, in bytes.
_TENS = (("GB", 10**9, 10**9), ("MB", 10**6, 10**7), ("kB", 10**3, 10**4), ("B", 1, 0))
_TWOS = {"GB": ("GiB", 2**30), "MB": ("MiB", 2**20), "kB": ("KiB", 2**10)}


def unit_for(amounts: Iterable[float]) -> tuple[str, int]:
    """Return a common unit for amounts in bytes, and its size.

    The largest amount decides: GB (10^9 bytes) from 1 GB, MB from 10 MB, kB from 10 kB.
    """
    most = max((abs(amount) for amount in amounts), default=0)
    return next((name, size) for name, size, least in _TENS if most >= least)


def binary_unit(unit: tuple[str, int]) -> tuple[str, int] | None:
    """Return the binary unit next to a decimal unit, such as GiB for GB; None for bytes."""
    return _TWOS.get(unit[0])


def in_unit(amount: float, unit: tuple[str, int]) -> str:
    """Return an amount in its column's unit."""
    if unit[1] == 1:
        return f"{amount:,.0f}"
    # A small amount would be shown as 0.00, so it gets its own unit.
    if 0 < abs(amount) < unit[1] / 100:
        return binary_bytes(amount) if unit in _TWOS.values() else decimal_bytes(amount)
    return f"{amount / unit[1]:,.2f}"


def decimal_bytes(amount: float) -> str:
    """Return an amount with its decimal unit, such as `38.50 GB`."""
    unit = unit_for([amount])
    return f"{in_unit(amount, unit)} {unit[0]}"


def binary_bytes(amount: float) -> str:
    """Return an amount with its binary unit, such as `35.86 GiB`."""
    unit = binary_unit(unit_for([amount]))
    return f"{amount:,.0f} B" if unit is None else f"{in_unit(amount, unit)} {unit[0]}"


def bar(share: float) -> str:
    """Return a bar of at least one character, padded to `BAR_CHARS`.

    Args:
        share: Length relative to the longest bar, 0 to 1.
    """
    return f"{'█' * max(1, round(share * BAR_CHARS)):<{BAR_CHARS}}"


def aligned(rows: Sequence[Sequence[str]], *, words: Container[int] = (0,)) -> str:
    """Return a table with words aligned left and numbers aligned right.

    Args:
        rows: Cells by row, with an optional heading first.
        words: Indices of the word columns.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column in words else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def fitted(rows: Sequence[Sequence[str]], *, columns: int | None) -> str:
    """Return an aligned table, transposed if the terminal is too narrow.

    Args:
        rows: Cells by row, the heading first. The first column names the row.
        columns: Terminal width; None for no limit.
    """
    table = aligned(rows)
    if columns is None or max(map(len, table.splitlines())) <= columns:
        return table
    named, *sideways = (list(column) for column in zip(*rows, strict=True))
    label, *names = named
    # If all rows have the same name, print it once instead of widening each column.
    if len(set(names)) == 1:
        return f"{label}: {names[0]}\n{aligned(sideways)}"
    return aligned([named, *sideways])


def cut_middle(text: str, chars_max: int) -> str:
    """Shorten a text to `chars_max` characters, with `...` in place of its middle."""
    if len(text) <= chars_max:
        return text
    head = chars_max // 2
    return f"{text[:head]}...{text[len(text) - (chars_max - 3 - head) :]}"
