"""Calls that concern a process as a whole, where a rank of a script makes them.

What it wants done at its exit is done when it ends. Handlers of signals are taken and never called:
a signal that ends the command ends it, with all ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from zero_sim.sim.world.rank_threads import rank_state


class _Rank(threading.local):
    def __init__(self) -> None:
        self.at_exit: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
        self.handlers: dict[int, Any] = {}


_rank = _Rank()


@contextlib.contextmanager
def calls_of_ranks(owns: Callable[[str], bool]) -> Iterator[None]:
    """Take such calls from ranks; those of other threads, and of shared modules, are as ever.

    Args:
        owns: Whether a module is the running rank's own.
    """
    register, unregister = atexit.register, atexit.unregister
    put, get = signal.signal, signal.getsignal

    def register_in_rank(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        # A shared module is imported once, and not done with when one rank is.
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if rank_state.join is None or not owns(caller):
            return register(function, *args, **kwargs)
        _rank.at_exit.append((function, args, kwargs))
        return function

    def unregister_in_rank(function: Callable[..., Any], /) -> None:
        _rank.at_exit[:] = [each for each in _rank.at_exit if each[0] != function]
        unregister(function)

    def put_in_rank(number: int, handler: Any, /) -> Any:
        if rank_state.join is None:
            return put(number, handler)
        before = get_in_rank(number)
        _rank.handlers[number] = handler
        return before

    def get_in_rank(number: int, /) -> Any:
        if rank_state.join is None or number not in _rank.handlers:
            return get(number)
        return _rank.handlers[number]

    with (
        mock.patch.object(atexit, "register", register_in_rank),
        mock.patch.object(atexit, "unregister", unregister_in_rank),
        mock.patch.object(signal, "signal", put_in_rank),
        mock.patch.object(signal, "getsignal", get_in_rank),
    ):
        yield


def run_at_exit() -> None:
    """Do what the calling rank wants done at its exit, the latest first."""
    _rank.handlers.clear()
    while _rank.at_exit:
        function, args, kwargs = _rank.at_exit.pop()
        function(*args, **kwargs)
