"""Integer division with its intent spelled out: up, or to a multiple."""

from __future__ import annotations

from zero_sim.errors import LayoutError


def ceil_div(value: int, /, divisor: int) -> int:
    """Return `value / divisor` rounded up.

    Args:
        value: What is divided; not negative.
        divisor: What it is divided by; positive.

    Raises:
        LayoutError: If `value < 0` or `divisor < 1`.
    """
    if value < 0:
        raise LayoutError(f"expected a size of at least 0, got {value}.")
    if divisor < 1:
        raise LayoutError(f"expected a divisor of at least 1, got {divisor}.")
    return -(-value // divisor)


def round_up(value: int, /, multiple: int) -> int:
    """Return the least multiple of `multiple` that is not below `value`.

    Raises:
        LayoutError: If `value < 0` or `multiple < 1`.
    """
    return ceil_div(value, multiple) * multiple
