"""Calls by ranks that would affect the whole process: exit, signals, new processes.

Exit functions run when the rank ends. Signal handlers are stored but never called, because a signal
that ends the command ends all ranks. If a rank starts ranks, its world ends, and the script runs
again as their starter.
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
        # Exit functions in order of registration.
        self.at_exit: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
        self.handlers: dict[int, Any] = {}


_rank = _Rank()


@contextlib.contextmanager
def calls_of_ranks(owns: Callable[[str], bool]) -> Iterator[None]:
    """Redirect `atexit` and `signal` calls of ranks to rank-local state.

    Calls of other threads, and `atexit` calls of shared modules, are not redirected.

    Args:
        owns: Returns True if a module belongs to the running rank alone.
    """
    register, unregister = atexit.register, atexit.unregister
    put, get = signal.signal, signal.getsignal

    def register_in_rank(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        # A shared module registers once for all ranks, which still need it when the first rank
        # ends.
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if rank_state.join is None or not owns(caller):
            return register(function, *args, **kwargs)
        _rank.at_exit.append((function, args, kwargs))
        return function

    def unregister_in_rank(function: Callable[..., Any], /) -> None:
        # In both lists, because a shared module may have registered the function.
        _rank.at_exit[:] = [each for each in _rank.at_exit if each[0] != function]
        unregister(function)

    def put_in_rank(number: int, handler: Any, /) -> Any:
        if rank_state.join is None:
            return put(number, handler)
        # Only a process's main thread may set a handler, and ranks are other threads.
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
    """End the world if a rank starts ranks. Other processes start as usual."""
    start, join = BaseProcess.start, BaseProcess.join
    start_processes = torch.multiprocessing.start_processes
    module = sys.modules[start_processes.__module__]
    sites: WeakKeyDictionary[BaseProcess, str] = WeakKeyDictionary()

    def start_in_rank(process: BaseProcess) -> None:
        if rank_state.join is None:
            start(process)
            return
        # Remember the call site, because a failure is only detected in `join`, far from the start.
        sites[process] = here()
        if is_rank(process, all_own=False):
            raise _started_at(sites[process], all_own=False)
        process.run = GuardedRun(process.run, no_rank(rank_state.rank, sites[process]))
        try:
            start(process)
        finally:
            # Restore the original `run` in this process: only the child is guarded.
            del process.run

    def join_in_rank(process: BaseProcess, timeout: float | None = None) -> None:
        # If the guard in the child refused, the child joins a group, but `is_rank` could not detect
        # this.
        join(process, timeout)
        if process in sites and process.exitcode == REFUSED_STATUS:
            raise _started_at(sites[process], all_own=True)

    @functools.wraps(start_processes)
    def start_several(fn: Any, args: Any = (), nprocs: int = 1, *rest: Any, **options: Any) -> Any:
        # torch would start no process and return at once, and the script would end without an
        # error.
        if rank_state.join is not None and nprocs == 0 and not torch.cuda.device_count():
            raise RuntimeError(
                "expected at least one process to start, got 0, the number of GPUs. Start a "
                "process per rank, regardless of the number of GPUs."
            )
        return start_processes(fn, args, nprocs, *rest, **options)

    with (
        mock.patch.object(BaseProcess, "start", start_in_rank),
        mock.patch.object(BaseProcess, "join", join_in_rank),
        mock.patch.object(torch.multiprocessing, "start_processes", start_several),
        # The module `spawn` looks up its own global. In the package, this name is a function.
        mock.patch.object(module, "start_processes", start_several),
    ):
        yield


def check_may_launch() -> None:
    """End the world of a rank that runs a launch command.

    Raises:
        BaseException: Always. The script then runs again as the starter of its ranks.
    """
    raise _started_at(here(), all_own=False)


def _started_at(site: str, *, all_own: bool) -> BaseException:
    """Return the error for a rank that starts ranks."""
    world, run = rank_state.c10d_world, rank_state.run
    # Outside of any group, the script may be a plain launcher. In a group, this is a real rank.
    if isinstance(run, Run) and (world is None or world.default_pg is None):
        run.fail(StartsRanks(site, all_own=all_own))
        # RankEnded is no Exception, so that the script cannot catch it by accident.
        return RankEnded()
    return NoRank(no_rank(rank_state.rank, site))


def run_at_exit() -> None:
    """Run the calling rank's exit functions in reverse order, as Python does."""
    _rank.handlers.clear()
    # A loop, because an exit function may register another.
    while _rank.at_exit:
        function, args, kwargs = _rank.at_exit.pop()
        function(*args, **kwargs)
