"""Calls that concern a process as a whole, where a rank of a script makes them.

What it wants done at its exit is done when it ends. Handlers of signals are taken and never called:
a signal that ends the command ends it, with all ranks. A rank that starts ranks ends its world, and
the script then runs as their starter.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch.multiprocessing

from zero_sim.script.child_guard import REFUSED_STATUS, GuardedRun, NoRank, no_rank
from zero_sim.script.rank_processes import StartsRanks, is_rank
from zero_sim.sim.callsite import here
from zero_sim.sim.failures import RankEnded
from zero_sim.sim.world.rank_threads import rank_state
from zero_sim.sim.world.run import Run


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


@contextlib.contextmanager
def processes_of_ranks() -> Iterator[None]:
    """End the world where a rank starts ranks; others of its processes run as ever."""
    start, join = BaseProcess.start, BaseProcess.join
    start_processes = torch.multiprocessing.start_processes
    module = sys.modules[start_processes.__module__]
    sites: WeakKeyDictionary[BaseProcess, str] = WeakKeyDictionary()

    def start_in_rank(process: BaseProcess) -> None:
        if rank_state.join is None:
            start(process)
            return
        sites[process] = here()
        if is_rank(process, all_own=False):
            raise _started_at(sites[process], all_own=False)
        process.run = GuardedRun(process.run, no_rank(rank_state.rank, sites[process]))
        try:
            start(process)
        finally:
            del process.run

    def join_in_rank(process: BaseProcess, timeout: float | None = None) -> None:
        join(process, timeout)
        if process in sites and process.exitcode == REFUSED_STATUS:
            raise _started_at(sites[process], all_own=True)

    @functools.wraps(start_processes)
    def start_several(fn: Any, args: Any = (), nprocs: int = 1, *rest: Any, **options: Any) -> Any:
        if rank_state.join is not None and nprocs == 0 and not torch.cuda.device_count():
            raise RuntimeError("expected processes to start, got none: the number of GPUs is 0")
        return start_processes(fn, args, nprocs, *rest, **options)

    with (
        mock.patch.object(BaseProcess, "start", start_in_rank),
        mock.patch.object(BaseProcess, "join", join_in_rank),
        mock.patch.object(torch.multiprocessing, "start_processes", start_several),
        # The attribute `spawn` of the package is a function; the module of that name calls its own.
        mock.patch.object(module, "start_processes", start_several),
    ):
        yield


def check_may_launch() -> None:
    """End the world where a rank launches ranks by a command; the starter of ranks may.

    Raises:
        BaseException: The calling rank is one that torchrun started.
    """
    raise _started_at(here(), all_own=False)


def _started_at(site: str, *, all_own: bool) -> BaseException:
    """The error for ranks that the calling rank starts."""
    world, run = rank_state.c10d_world, rank_state.run
    if isinstance(run, Run) and (world is None or world.default_pg is None):
        run.fail(StartsRanks(site, all_own=all_own))
        # No Exception, which the script may catch.
        return RankEnded()
    return NoRank(no_rank(rank_state.rank, site))


def run_at_exit() -> None:
    """Do what the calling rank wants done at its exit, the latest first."""
    _rank.handlers.clear()
    while _rank.at_exit:
        function, args, kwargs = _rank.at_exit.pop()
        function(*args, **kwargs)
