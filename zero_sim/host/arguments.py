"""Type checks for arguments of callers: a world's settings, and programs for ranks."""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Callable, Mapping
from typing import Literal

from zero_sim.errors import UsageError

Kind = Literal["a name", "a name or a recipe", "an integer", "a number", "True or False", "a list"]

WORLD_SETTINGS: Mapping[str, Kind] = {
    "order": "a name",
    "schedule": "a name or a recipe",
    "timing": "a name",
    "seed": "an integer",
    "depth": "an integer",
    "races": "True or False",
    "stall_seconds": "a number",
    "strict": "True or False",
    "faults": "a list",
}
"""Kinds of `zero_sim.sim.World`'s settings. The world itself checks the values."""


def is_of_kind(value: object, kind: Kind) -> bool:
    """Return True if an argument has the right type. numpy numbers do; bools are no numbers."""
    match kind:
        case "a name":
            return isinstance(value, str)
        case "an integer":
            # bool is a subclass of int, so True would count as 1.
            return isinstance(value, numbers.Integral) and not isinstance(value, bool)
        case "a number":
            return isinstance(value, numbers.Real) and not isinstance(value, bool)
        case "True or False":
            return isinstance(value, bool)
        case "a list":
            return isinstance(value, (list, tuple))
        case _:
            return value is not None


def check_kind(name: str, value: object, kind: Kind) -> None:
    """Raise UsageError if an argument has the wrong type."""
    if not is_of_kind(value, kind):
        raise UsageError(f"expected {name} to be {kind}, got {value!r}")


def unrun_function(function: Callable[..., object]) -> str | None:
    """Return the kind of a function whose body does not run when it is called.

    Args:
        function: Function, method, partial, or object with `__call__`.

    Returns:
        `an async def function` or `a generator function`; None for all other functions.
    """
    while isinstance(function, functools.partial):
        function = function.func
    # inspect only recognises functions, so pass an object's `__call__`.
    is_object = not inspect.isroutine(function) and not inspect.isclass(function)
    called = type(function).__call__ if is_object else function
    if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
        return "an async def function"
    return "a generator function" if inspect.isgeneratorfunction(called) else None


def unrun_result(returned: object) -> str | None:
    """Return the kind of the function that returned a result without running its body.

    For example, a lambda may call an `async def` function, which `unrun_function` cannot see.

    Returns:
        `an async def function` or `a generator function`; None for all other results.
    """
    if inspect.iscoroutine(returned):
        # Python would warn about a coroutine that was never awaited.
        returned.close()
    if inspect.isawaitable(returned) or inspect.isasyncgen(returned):
        return "an async def function"
    return "a generator function" if inspect.isgenerator(returned) else None
