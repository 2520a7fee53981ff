"""Futures of operations in flight. They complete in their rank's thread."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import torch

from zero_sim.sim.failures import WorldFailure


class FutureSource(Protocol):
    """The work behind a future."""

    def wait(self) -> bool:
        """Block the rank until the operation is done. Then the rank may use its memory."""
        ...

    def poll_future(self) -> None:
        """Complete the work's futures if it was performed; otherwise let other ranks run."""
        ...

    def complete_written(self) -> None:
        """Complete the work's futures if its outputs are written."""
        ...

    def note_callback(self) -> None:
        """Note that a future has a callback, until the rank has waited."""
        ...

    def memory_for_callback(self) -> AbstractContextManager[object]:
        """Return a context in which the outputs are available and not in flight."""
        ...


class _Settled(torch.futures.Future):
    """The argument of a callback: a done future, whose wait() does not wait for the work."""

    def wait(self) -> Any:
        """Return the result."""
        return self.value()


# [Note: completion] A future is done once its outputs are written, or once the rank polled `done()`
# after the operation was performed. The timing decides which comes first. As with NCCL, a done
# future is not a wait: the outputs stay in flight until the rank waits for the work, for any of its
# futures, or for a future returned by `then`.
#
# A callback runs inside `then` if the future is done, and if not, when it becomes done. While the
# callback runs, the outputs are available and not in flight, because NCCL runs callbacks on a
# stream that waits. In `then`, NCCL's futures are always done, but gloo's become done at any later
# time. So if a callback issues a collective, its position in the program's order is not fixed.
#
# [Note: C++] If C++ blocks on a future, it blocks the rank's thread and no other rank can run. So
# every future is done before C++ gets it; see `zero_sim.sim.world.torch_futures`.
class SimFuture(torch.futures.Future):
    """The future of works, or of a callback's result; see [Note: completion].

    Args:
        works: The works to wait for, all of the same rank.
        has_plain: True if the future also depends on plain futures, without a work.
    """

    def __init__(self, works: Sequence[FutureSource], *, has_plain: bool = False) -> None:
        super().__init__()
        self.works = works
        self.has_plain = has_plain
        # Not in torch's list, because callbacks need the works' memory while they run.
        self._callbacks: list[Callable[[], None]] = []

    def wait(self) -> Any:
        """Wait for all works and return the result."""
        self.wait_for_works()
        return super().wait()

    def wait_for_works(self) -> None:
        """Wait for all works, even if the result is an exception."""
        for work in self.works:
            work.wait()

    def done(self) -> bool:
        """Return True if the result is known; otherwise let other ranks run. Not a wait."""
        if not super().done():
            for work in self.works:
                work.poll_future()
        return super().done()

    def value(self) -> Any:
        """Return the result without a wait.

        Raises:
            RuntimeError: The result is not known yet.
        """
        self._catch_up()
        if not super().done():
            raise RuntimeError(
                "expected a future that is done, got a pending future in value(). "
                "Call wait(), which returns the value."
            )
        return super().value()

    def then(self, callback: Callable[[torch.futures.Future], Any]) -> SimFuture:
        """Return a future for the callback's result. Waiting for it waits for the works."""
        child = SimFuture(self.works, has_plain=self.has_plain)
        self._add(lambda: child.complete(lambda: self._call(callback)))
        return child

    def add_done_callback(self, callback: Callable[[torch.futures.Future], Any]) -> None:
        """Call back when done. Print the callback's errors, because nothing waits for it."""

        def run() -> None:
            try:
                self._call(callback)
            except WorldFailure:
                # The end of the world must reach the rank.
                raise
            except Exception:  # noqa: BLE001
                traceback.print_exc()

        self._add(run)

    def complete(self, result: Callable[[], Any]) -> None:
        """Set the result or exception of a function call, then run the callbacks."""
        try:
            value = result()
        except WorldFailure:
            raise
        except Exception as error:  # noqa: BLE001
            self.set_exception(error)
        else:
            self.set_result(value)
        self.run_callbacks()

    def run_callbacks(self) -> None:
        """Run all callbacks, after the result is known."""
        # Take them out first, because a callback may add others.
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def when_done(self, action: Callable[[], None]) -> None:
        """Run an action once the result is known. The works' memory may stay in flight."""
        self._catch_up()
        if super().done():
            action()
            return
        self._callbacks.append(action)

    def _add(self, callback: Callable[[], None]) -> None:
        for work in self.works:
            work.note_callback()
        self.when_done(callback)

    def _catch_up(self) -> None:
        if not super().done():
            for work in self.works:
                work.complete_written()

    def _call(self, callback: Callable[[torch.futures.Future], Any]) -> Any:
        """Call a callback. Wrap its exception as torch does."""
        with ExitStack() as memory:
            # See [Note: completion]: the callback may use the outputs.
            for work in self.works:
                memory.enter_context(work.memory_for_callback())
            try:
                return callback(self._copy())
            except WorldFailure:
                raise
            except Exception as error:
                raise RuntimeError(
                    "Got the following error when running the callback: "
                    f"{type(error).__name__}: {error}"
                ) from error

    def _copy(self) -> _Settled:
        copy = _Settled()
        try:
            copy.set_result(super().value())
        except Exception as error:  # noqa: BLE001
            copy.set_exception(error)
        return copy


def collect_all(futures: Sequence[torch.futures.Future]) -> SimFuture:
    """Return a future that is done when all `futures` are, at least one of them a SimFuture."""
    of_works = [each for each in futures if isinstance(each, SimFuture)]
    # Ordered and without duplicates, so the order of waits is deterministic.
    works = dict.fromkeys(work for each in of_works for work in each.works)
    has_plain = len(of_works) < len(futures) or any(each.has_plain for each in of_works)
    collected = SimFuture(list(works), has_plain=has_plain)
    left = len(futures)

    def count_down(_: torch.futures.Future | None = None) -> None:
        nonlocal left
        left -= 1
        if not left:
            collected.complete(lambda: _without_error(futures))

    for future in futures:
        if isinstance(future, SimFuture):
            future.when_done(count_down)
        else:
            future.add_done_callback(count_down)
    return collected


def _without_error(futures: Sequence[torch.futures.Future]) -> list[torch.futures.Future]:
    # `value` raises a failed future's exception.
    for future in futures:
        future.value()
    return list(futures)
