"""Checks for a world's settings and program."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zero_sim.errors import UsageError
from zero_sim.host.arguments import (
    WORLD_SETTINGS,
    Kind,
    check_kind,
    unrun_function,
    unrun_result,
)
from zero_sim.sim.faults import Fault, check_faults
from zero_sim.sim.inflight.late import TIMINGS
from zero_sim.sim.order_backends import ORDERS
from zero_sim.sim.schedule import Recipe, check_schedule

WORLD_SIZE_MAX = 4096
_SEED_MIN, _SEED_MAX = -(2**63), 2**64 - 1 - WORLD_SIZE_MAX
"""Range of torch's seeds. Rank r adds r, so the maximum leaves room for all ranks."""

_KINDS: Mapping[str, Kind] = {**WORLD_SETTINGS, "initialized": "True or False"}


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldSettings:
    """Settings for a world's next run. `zero_sim.sim.World` documents them.

    Example:
        >>> WorldSettings().changed(4, seed=1, order="ring").order
        'ring'
    """

    order: str = "linear"
    schedule: str | Recipe = "round-robin"
    timing: str = "eager"
    seed: int = 0
    depth: int = 3
    races: bool = False
    stall_seconds: float = 60.0
    strict: bool = True
    faults: Sequence[Fault] = ()
    initialized: bool = True

    def changed(self, world_size: int, /, **changes: Any) -> WorldSettings:
        """Return a copy with some settings replaced.

        Raises:
            UsageError: A value has the wrong type or is out of range.
        """
        check_settings(world_size, changes)
        # After the check, because a wrong type must be an error.
        plain = {
            name: _PLAIN[name](value) if name in _PLAIN else value
            for name, value in changes.items()
        }
        return replace(self, **plain)


# Convert numpy numbers, because logs and messages print Python's.
_PLAIN: Mapping[str, Callable[[Any], Any]] = {
    "seed": operator.index,
    "depth": operator.index,
    "stall_seconds": float,
    "faults": tuple,
}


def check_settings(world_size: Any, settings: Mapping[str, Any]) -> None:
    """Check some or all settings of a `World`.

    Raises:
        UsageError: A setting is unknown, has the wrong type or is out of range.
    """
    check_kind("world_size", world_size, "an integer")
    if not 1 <= world_size <= WORLD_SIZE_MAX:
        raise UsageError(f"expected world_size between 1 and {WORLD_SIZE_MAX}, got {world_size}")
    for name, value in settings.items():
        if name not in _KINDS:
            raise UsageError(f"expected a setting of a world ({', '.join(_KINDS)}), got {name!r}")
        check_kind(name, value, _KINDS[name])
        # After the kind, because the comparisons need the right type.
        _check_value(name, value, world_size=operator.index(world_size))


def _check_value(name: str, value: Any, *, world_size: int) -> None:
    match name:
        case "order" if value not in ORDERS:
            raise UsageError(f"expected order to be one of {sorted(ORDERS)}, got {value!r}")
        case "timing" if value not in TIMINGS:
            raise UsageError(f"expected timing to be one of {list(TIMINGS)}, got {value!r}")
        case "schedule":
            check_schedule(value)
        case "seed" if not _SEED_MIN <= value <= _SEED_MAX:
            raise UsageError(f"expected seed between {_SEED_MIN} and {_SEED_MAX}, got {value}")
        case "depth" if value < 1:
            raise UsageError(f"expected depth to be at least 1, got {value}")
        case "stall_seconds" if not 0 < value <= threading.TIMEOUT_MAX:
            raise UsageError(
                "expected stall_seconds to be more than 0 and at most "
                f"{threading.TIMEOUT_MAX:g}, got {value}"
            )
        case "faults":
            check_faults(value, world_size=world_size)


def check_program(program: Callable[[int], Any]) -> None:
    """Raise UsageError if a program is not callable, or a call would not run its body."""
    if not callable(program):
        raise UsageError(f"expected a function of the rank, got {program!r}")
    # A call of an async def or generator function only makes an object.
    kind = unrun_function(program)
    if kind is not None:
        raise _not_run(kind, "")


def check_results(results: Sequence[Any]) -> None:
    """Raise UsageError if a rank returned a coroutine or generator, whose body never ran."""
    # `check_program` accepts a lambda that calls an async def function, so check results too.
    kinds = [unrun_result(result) for result in results]
    for rank, kind in enumerate(kinds):
        if kind is not None:
            raise _not_run(kind, f" that rank {rank} called and returned")


def _not_run(kind: str, whose: str) -> UsageError:
    remedy = (
        "Pass a plain function that calls asyncio.run(...)."
        if kind == "an async def function"
        else "Pass a function that does not yield, and return a list of the values."
    )
    return UsageError(
        f"expected a program that runs when it is called, got {kind}{whose}, whose body never "
        f"runs. {remedy}"
    )
