"""Integer division with its intent spelled out: up, to a multiple, or exact."""

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
    _check_operands(value, divisor)
    return -(-value // divisor)


def round_up(value: int, /, multiple: int) -> int:
    """Return the least multiple of `multiple` that is not below `value`.

    Raises:
        LayoutError: If `value < 0` or `multiple < 1`.
    """
    return ceil_div(value, multiple) * multiple


def exact_div(value: int, /, divisor: int) -> int:
    """Return `value / divisor`, which must be whole.

    Raises:
        LayoutError: If `divisor` does not divide `value`, `value < 0` or `divisor < 1`.
    """
    _check_operands(value, divisor)
    quotient, remainder = divmod(value, divisor)
    if remainder:
        raise LayoutError(
            f"expected a multiple of {divisor}, got {value}, which leaves {remainder}. "
            f"Try round_up({value}, {divisor}) = {round_up(value, divisor)}."
        )
    return quotient


def _check_operands(value: int, divisor: int) -> None:
    if value < 0:
        raise LayoutError(f"expected a size of at least 0, got {value}.")
    if divisor < 1:
        raise LayoutError(f"expected a divisor of at least 1, got {divisor}.")
