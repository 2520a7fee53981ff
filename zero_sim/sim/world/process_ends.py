"""Ends of processes: os._exit in a rank, and forks. Also errors for threads without a group."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from torch.distributed import distributed_c10d as torch_c10d

from zero_sim.sim.comm import torch_stores
from zero_sim.sim.world import profilers
from zero_sim.sim.world.rank_threads import check_not_forked, no_rank, rank_state

_lock = threading.Lock()
_open_count = 0
_originals: dict[str, Callable[..., Any]] = {}


def end_forked(error: BaseException | None) -> NoReturn:
    """End a process that a rank forked, once the rank's program has ended in it."""
    if error is not None:
        traceback.print_exception(error)
    # os._exit flushes nothing.
    sys.stdout.flush()
    sys.stderr.flush()
    _exit = _originals.get("_exit", os._exit)
    _exit(0 if error is None else 1)
    raise AssertionError("a process continued after its end")


def _exit(status: int) -> NoReturn:
    """Replace os._exit: in a rank, end the world instead of the process."""
    if rank_state.leave is not None:
        rank_state.leave(status)
    _originals["_exit"](status)
    raise AssertionError("a process continued after its end")


def _get_default_group() -> Any:
    """Replace torch's function, to explain why a thread has no group."""
    try:
        return _originals["_get_default_group"]()
    except ValueError as error:
        check_not_forked()
        # Ranks and the main thread get torch's own error.
        if rank_state.rank is not None or threading.current_thread() is threading.main_thread():
            raise
        raise ValueError(f"{error} {no_rank()}") from error


def install() -> None:
    """Install the replacements. Counted, because several worlds may be open."""
    global _open_count
    with _lock:
        _open_count += 1
        if _open_count > 1:
            return
        _originals["_exit"] = os._exit
        _originals["_get_default_group"] = torch_c10d._get_default_group
        os._exit = _exit
        torch_c10d._get_default_group = _get_default_group
        profilers.install(lambda: rank_state.rank)
        torch_stores.install(rank_state)


def uninstall() -> None:
    """Restore Python's and torch's functions when the last world closes."""
    global _open_count
    with _lock:
        _open_count -= 1
        if _open_count:
            return
        os._exit = _originals["_exit"]
        torch_c10d._get_default_group = _originals["_get_default_group"]
        profilers.uninstall()
        torch_stores.uninstall()
