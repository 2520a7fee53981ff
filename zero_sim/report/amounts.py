"""Amounts as people read them: bytes in powers of ten (GB) and of two (GiB), bars and tables."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

BAR_CHARS = 40
"""Width of a bar, whatever the terminal's."""
_TENS = (("GB", 10**9), ("MB", 10**6), ("B", 1))


def unit_for(amounts: Iterable[float]) -> tuple[str, int]:
    """The unit in which several amounts of bytes are told beside each other, and its size.

    GB are 10^9 bytes; the greatest amount is at least a tenth of the unit.
    """
    most = max((abs(amount) for amount in amounts), default=0)
    return next((unit for unit in _TENS if most >= unit[1] / 10), _TENS[-1])


def binary_unit(unit: tuple[str, int]) -> tuple[str, int] | None:
    """The power of two beside a unit: GiB for GB; None beside bytes."""
    return {"GB": ("GiB", 2**30), "MB": ("MiB", 2**20)}.get(unit[0])


def in_unit(amount: float, unit: tuple[str, int]) -> str:
    """An amount of bytes in a unit, which the head of its column names."""
    return f"{amount:,.0f}" if unit[1] == 1 else f"{amount / unit[1]:,.2f}"


def decimal_bytes(amount: float) -> str:
    """Return an amount with its unit, `38.50 GB`: powers of ten."""
    unit = unit_for([amount])
    return f"{in_unit(amount, unit)} {unit[0]}"


def binary_bytes(amount: float) -> str:
    """Return an amount with its unit, `35.86 GiB`: powers of two."""
    for power, name in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if amount >= 1024**power / 10:
            return f"{amount / 1024**power:,.2f} {name}"
    return f"{amount:,.0f} B"


def bar(share: float) -> str:
    """A bar as text, at least one character long, padded to `BAR_CHARS`.

    Args:
        share: Of the longest bar.
    """
    return f"{'█' * max(1, round(share * BAR_CHARS)):<{BAR_CHARS}}"


def aligned(rows: Sequence[Sequence[str]], *, words: Container[int] = (0,)) -> str:
    """A table, without blanks at the ends of lines; words to the left, numbers to the right.

    Args:
        rows: The head first, if there is one.
        words: Indices of the columns of words.
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
