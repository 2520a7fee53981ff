"""torch's futures at the places where C++ waits for them. torch's private names stay in here.

In a rank, each place first waits for the future's works, as a rank waits: other ranks run
meanwhile.
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
    """Wait for everything that a future depends on, and return the future."""
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


# [Note: plain futures] A program can make its own future and complete it in a callback of a work's
# future. Then a wait for the plain future is a wait for that work, but the work is unknown. So it
# counts as a wait for all works whose callbacks have run. While the future is not done, other works
# with callbacks are waited for too.
def _wait_for_callbacks(future: torch._C.Future) -> None:
    """Wait for the works that a future may depend on; see [Note: plain futures]."""
    works = _works_with_callbacks()
    if not isinstance(future, SimFuture) or future.has_plain:
        for work in [each for each in works if each.are_futures_done]:
            work.wait()
    # In order of their first callback, so that the run is deterministic.
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
    # Through this frame, the reducer's work recognises that C++ takes its future
    # (`SimWork.get_future`).
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
        # From `vars`, to restore the very object that the class had.
        _originals.append(vars(owner)[name])
        setattr(owner, name, wrap(getattr(owner, name)))


def uninstall() -> None:
    """Restore torch's own functions when the last world closes."""
    for (owner, name, _), original in zip(_PLACES, _originals, strict=True):
        setattr(owner, name, original)
    _originals.clear()
