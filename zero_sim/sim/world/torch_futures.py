"""Waits for torch's futures in C++, made safe for ranks. torch's private names stay in here.

In a rank, each wait first passes on the baton until the future's works are done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Reducer

from zero_sim.sim.inflight.futures import SimFuture, collect_all
from zero_sim.sim.inflight.work import SimWork
from zero_sim.sim.world.rank_threads import rank_state
from zero_sim.sim.world.run import Run

_is_done = torch._C.Future.done


def _finish(future: Any) -> Any:
    """Wait for all works behind a future, and return the future."""
    if isinstance(future, SimFuture):
        future.wait()
    elif isinstance(future, torch._C.Future):
        _wait_for_callbacks(future)
    return future


def _works_with_callbacks() -> Mapping[SimWork, None]:
    run, rank = rank_state.run, rank_state.rank
    if not isinstance(run, Run) or rank is None:
        # Outside of a rank, nothing is in flight.
        return {}
    return run.buffers[rank].works_with_callbacks


# [Note: plain futures] A program can make its own future and complete it in a callback on a work's
# future. A wait for the plain future then waits for this work, but we do not know which work it is.
# So the wait counts for all works whose callbacks have run, and it waits for other works with
# callbacks until the future is done.
def _wait_for_callbacks(future: torch._C.Future) -> None:
    """Wait for the works that may be behind a future; see [Note: plain futures]."""
    works = _works_with_callbacks()
    if not isinstance(future, SimFuture) or future.has_plain:
        for work in [each for each in works if each.are_futures_done]:
            work.wait()
    # In order of their first callback, because the run must be deterministic.
    while works and not _is_done(future):
        next(iter(works)).wait()


def _wrap_wait(original: Callable[..., Any]) -> Callable[..., Any]:
    def wait(future: torch._C.Future) -> Any:
        _wait_for_callbacks(future)
        return original(future)

    return wait


def _wrap_done(original: Callable[..., bool]) -> Callable[..., bool]:
    def done(future: torch._C.Future) -> bool:
        if not isinstance(future, SimFuture) and not original(future):
            for work in list(_works_with_callbacks()):
                work.poll_future()
        return original(future)

    return done


def _wrap_jit_wait(original: Callable[..., Any]) -> Callable[..., Any]:
    # TorchScript's wait blocks in C++.
    return lambda future: original(_finish(future))


def _wrap_collect(original: Callable[..., Any]) -> Callable[..., Any]:
    def collect(futures: Sequence[Any]) -> Any:
        if any(isinstance(each, SimFuture) for each in futures):
            return collect_all(list(futures))
        return original(futures)

    return collect


def _wrap_run(original: Callable[..., Any]) -> Callable[..., Any]:
    # C++ then calls `SimWork.get_future` from this frame, which does not name it.
    return lambda *args: original(*args)


def _wrap_register(original: Callable[..., Any]) -> Callable[..., Any]:
    def register(reducer: Reducer, state: object, hook: Callable[..., Any]) -> None:
        original(reducer, state, lambda *args: _finish(hook(*args)))

    return register


def _wrap_install(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda reducer, futures: original(reducer, [_finish(each) for each in futures])


_PLACES: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    # (owner, name, wrapper of the original)
    (torch._C.Future, "wait", _wrap_wait),
    (torch._C.Future, "done", _wrap_done),
    (torch._C, "wait", _wrap_jit_wait),
    (torch._C, "_collect_all", _wrap_collect),
    (dist, "_register_comm_hook", _wrap_register),
    (Reducer, "_run_comm_hook", _wrap_run),
    (Reducer, "_run_allreduce_hook", _wrap_run),
    (Reducer, "_install_post_backward_futures", _wrap_install),
)
_originals: list[Any] = []


def install() -> None:
    """Install the waits. Called for the first world that opens."""
    for owner, name, wrap in _PLACES:
        # From `vars`, to restore the identical object: getattr would bind it.
        _originals.append(vars(owner)[name])
        setattr(owner, name, wrap(getattr(owner, name)))


def uninstall() -> None:
    """Restore torch's functions when the last world closes."""
    for (owner, name, _), original in zip(_PLACES, _originals, strict=True):
        setattr(owner, name, original)
    _originals.clear()
