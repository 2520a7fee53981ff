"""Option types for large whole numbers, such as 7e9, and lists of these."""

from __future__ import annotations

import re
from typing import Any

import click

_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_COUNT = re.compile(r"(\d[\d_]*(?:\.\d+)?(?:e\d{1,2})?)([kmbt]?)", re.IGNORECASE)


class Count(click.ParamType):
    """A whole number such as 7e9, 7_000_000_000 or 7b."""

    name = "count"

    def __init__(self, most: int) -> None:
        self._most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number."""
        if isinstance(value, int):
            return value
        found = _COUNT.fullmatch(str(value).strip())
        number = 0.0
        if found:
            digits = found[1].replace("_", "")
            scale = _SUFFIXES[found[2].lower()]
            # Integers if possible, because floats above 2^53 lose digits.
            number = int(digits) * scale if digits.isdecimal() else float(digits) * scale
        # Check the bound first, because int() would raise for an infinite float.
        if not 1 <= number <= self._most or number != int(number):
            self.fail(
                f"expected a whole number of 1 to {self._most:,}, as 7e9, 7b or 7_000_000_000, got "
                f"{value!r}.",
                param,
                ctx,
            )
        return int(number)


class Counts(Count):
    """Several whole numbers, separated by commas: 2,4,1_024."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the numbers as a tuple."""
        if isinstance(value, tuple):
            return value
        each = super().convert
        return tuple(each(part, param, ctx) for part in str(value).split(","))


def joined(_: click.Context, param: click.Parameter, value: Any) -> tuple[int, ...]:
    """Return a repeated option's numbers in a single tuple; a callback."""
    return tuple(number for numbers in value for number in numbers)
