"""Integer division that rounds up."""

from __future__ import annotations

from zero_sim.errors import LayoutError


def ceil_div(value: int, /, divisor: int) -> int:
    """Return `value / divisor` rounded up.

    Args:
        value: Dividend, at least 0.
        divisor: Divisor, at least 1.

    Raises:
        LayoutError: If `value < 0` or `divisor < 1`.
    """
    # A negative size is a mistake that `//` would hide.
    if value < 0:
        raise LayoutError(f"expected a size of at least 0, got {value}.")
    if divisor < 1:
        raise LayoutError(f"expected a divisor of at least 1, got {divisor}.")
    # `//` rounds towards minus infinity, so negating twice rounds up.
    return -(-value // divisor)


def round_up(value: int, /, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`.

    Raises:
        LayoutError: If `value < 0` or `multiple < 1`.
    """
    return ceil_div(value, multiple) * multiple
