"""torch's profiler, which one rank at a time may use.

A process has one profiler. Sessions of two threads at once crash the process with a memory fault,
also without a simulation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.autograd import profiler

from zero_sim.errors import UsageError

_BEGINNING = ("_prepare_profiler", "_enable_profiler")
_ENDING = "_disable_profiler"

_originals: dict[str, Callable[..., Any]] = {}
_user: list[int] = []
"""The rank that has a session; empty if none has."""


def install(rank_of_thread: Callable[[], int | None]) -> None:
    """Let ranks use the profiler one at a time.

    Args:
        rank_of_thread: Returns the calling thread's rank, or None.
    """
    for name in (*_BEGINNING, _ENDING):
        _originals[name] = getattr(profiler, name)

    def begin(name: str, *args: Any, **kwargs: Any) -> Any:
        rank = rank_of_thread()
        if rank is not None:
            # Nested sessions of one rank are torch's own matter.
            if _user and _user[0] != rank:
                raise UsageError(
                    f"expected one rank at a time to use torch's profiler, which a process has "
                    f"only once, got rank {rank} while rank {_user[0]} has it. Profile on one "
                    "rank: `if dist.get_rank() == 0`. Or use `contextlib.nullcontext()` instead of "
                    "the profiler on the other ranks."
                )
            _user[:] = [rank]
        return _originals[name](*args, **kwargs)

    def end(*args: Any, **kwargs: Any) -> Any:
        _user.clear()
        return _originals[_ENDING](*args, **kwargs)

    for name in _BEGINNING:
        setattr(profiler, name, functools.partial(begin, name))
    setattr(profiler, _ENDING, end)


def uninstall() -> None:
    """Restore torch's own functions."""
    for name, original in _originals.items():
        setattr(profiler, name, original)
    _originals.clear()
    _user.clear()


def end_program(rank: int) -> None:
    """End a session that a rank left open when its program ended."""
    if _user == [rank]:
        _user.clear()
        # Another rank's session must not begin while this one is open.
        _originals[_ENDING]()
