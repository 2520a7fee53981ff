"""Futures of operations in flight, which complete in the thread of the rank that has them.

[Note: completion]
A future is done once its outputs are written, or once the rank has polled `done()` and the
operation was performed. Which of the two comes first is up to the timing. As with NCCL, done does
not mean waited: the outputs stay in flight until the rank waits for the work, for a future of it,
or for one that `then` made.

A callback runs in `then`, if the future is done by then, or else when it becomes done. While it
runs, the outputs are there and its operations have nothing in flight, because NCCL runs callbacks
on a stream that waits. NCCL's futures are always done in `then`, those of gloo at any time later:
a collective that a callback issues has no fixed place among those of the program.

[Note: C++]
C++ that blocks on a future blocks the rank, which could not let others run any more. So every
future is done before C++ gets it; `zero_sim.sim.world.torch_futures` knows the places.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import torch

from zero_sim.sim.failures import WorldFailure


class FutureSource(Protocol):
    """An operation, or several, that a future stands for: a work."""

    def wait(self) -> bool:
        """Block the rank until it is done; the rank may use its memory then."""
        ...

    def poll_future(self) -> None:
        """Complete its futures if it was performed; let other ranks run if not."""
        ...

    def complete_written(self) -> None:
        """Complete its futures if its outputs are written already."""
        ...

    def note_callback(self) -> None:
        """Note that a future of it has a callback, until the rank has waited for it."""
        ...

    def memory_for_callback(self) -> AbstractContextManager[object]:
        """Context in which its outputs are there and its memory is not in flight."""
        ...


class _Settled(torch.futures.Future):
    """The future that a callback gets: it is done, and its wait() is no wait for a work."""

    def wait(self) -> Any:
        """Return the result."""
        return self.value()


class SimFuture(torch.futures.Future):
    """The result of works, or of callbacks on it; see [Note: completion].

    Args:
        works: The works to wait for, all of one rank.
        has_plain: True if it depends on futures that are of no work, too.
    """

    def __init__(self, works: Sequence[FutureSource], *, has_plain: bool = False) -> None:
        super().__init__()
        self.works = works
        self.has_plain = has_plain
        self._callbacks: list[Callable[[], None]] = []

    def wait(self) -> Any:
        """Wait for all works and return the result; other ranks run meanwhile."""
        self.wait_for_works()
        return super().wait()

    def wait_for_works(self) -> None:
        """Wait for all works, whatever the result."""
        for work in self.works:
            work.wait()

    def done(self) -> bool:
        """Return True if the result is known, which is no wait; let other ranks run if not."""
        if not super().done():
            for work in self.works:
                work.poll_future()
        return super().done()

    def value(self) -> Any:
        """The result, without any wait for it.

        Raises:
            RuntimeError: It is not known yet.
        """
        self._catch_up()
        if not super().done():
            raise RuntimeError(
                "expected a future that is done, got value() of one that is not. "
                "Call wait(), which returns the value."
            )
        return super().value()

    def then(self, callback: Callable[[torch.futures.Future], Any]) -> SimFuture:
        """Return the future of the callback's result; a wait for it is a wait for the works."""
        child = SimFuture(self.works, has_plain=self.has_plain)
        self._add(lambda: child.complete(lambda: self._call(callback)))
        return child

    def add_done_callback(self, callback: Callable[[torch.futures.Future], Any]) -> None:
        """Call back when done; an error of the callback is printed, because nobody waits for it."""

        def run() -> None:
            try:
                self._call(callback)
            except WorldFailure:
                raise
            except Exception:  # noqa: BLE001
                traceback.print_exc()

        self._add(run)

    def complete(self, result: Callable[[], Any]) -> None:
        """Set the result that a function returns, or its exception, and run the callbacks."""
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
        """Run what waits for the result, once it is known."""
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def when_done(self, action: Callable[[], None]) -> None:
        """Do something as soon as the result is known, without the memory of the works."""
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
        """Call a callback; its exception becomes the one that torch makes of it."""
        with ExitStack() as memory:
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
    """The future of a list of futures, done when all are.

    Args:
        futures: At least one, some of them of works.
    """
    of_works = [each for each in futures if isinstance(each, SimFuture)]
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
    for future in futures:
        future.value()
    return list(futures)
