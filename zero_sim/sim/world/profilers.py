"""A lock on torch's profiler, for one rank at a time.

A process has a single profiler. If two threads use it at once, the process crashes with a memory
fault, also without a simulation.
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
"""The rank with an open session; empty if none."""


def install(rank_of_thread: Callable[[], int | None]) -> None:
    """Let only one rank use the profiler at a time."""
    for name in (*_BEGINNING, _ENDING):
        _originals[name] = getattr(profiler, name)

    def begin(name: str, *args: Any, **kwargs: Any) -> Any:
        rank = rank_of_thread()
        if rank is not None:
            # Leave nested sessions of the same rank to torch.
            if _user and _user[0] != rank:
                raise UsageError(
                    f"expected one rank at a time to use torch's profiler, because a process has "
                    f"only one, got rank {rank} while rank {_user[0]} uses it. Profile on one "
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
    """Restore torch's functions."""
    for name, original in _originals.items():
        setattr(profiler, name, original)
    _originals.clear()
    _user.clear()


def end_program(rank: int) -> None:
    """End a profiler session that a rank's program left open."""
    if _user == [rank]:
        _user.clear()
        # Another rank's session must not begin while this session is open.
        _originals[_ENDING]()
