"""Futures of operations in flight. They complete in the thread of their rank."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import torch

from zero_sim.sim.failures import WorldFailure


class FutureSource(Protocol):
    """The operation or operations behind a future: a work."""

    def wait(self) -> bool:
        """Block the rank until the operation is done. Then the rank may use its memory."""
        ...

    def poll_future(self) -> None:
        """Complete its futures if it was performed; otherwise let other ranks run."""
        ...

    def complete_written(self) -> None:
        """Complete its futures if its outputs are already written."""
        ...

    def note_callback(self) -> None:
        """Note that a future has a callback, until the rank has waited for the operation."""
        ...

    def memory_for_callback(self) -> AbstractContextManager[object]:
        """Return a context with its outputs available and its memory not in flight."""
        ...


class _Settled(torch.futures.Future):
    """The done future that a callback gets. Its wait() does not wait for the work."""

    def wait(self) -> Any:
        """Return the result."""
        return self.value()


# [Note: completion] A future is done once its outputs are written, or once the rank polled `done()`
# after the operation was performed. The timing decides which comes first. As with NCCL, a done
# future is not a wait. The outputs stay in flight until the rank waits for the work, one of its
# futures, or a future that `then` made.
#
# A callback runs inside of `then` if the future is done, otherwise when it becomes done. While it
# runs, the outputs are available and not in flight, because NCCL runs callbacks on a stream that
# waits. In `then`, NCCL's futures are always done; gloo's become done at any later time. So a
# collective that a callback issues has no fixed position among those of the program.
#
# [Note: C++] C++ that blocks on a future blocks the rank's thread, so no other rank could run.
# Therefore every future is done before C++ gets it. `zero_sim.sim.world.torch_futures` has the
# places.
class SimFuture(torch.futures.Future):
    """The result of works, or of callbacks on it; see [Note: completion].

    Args:
        works: The works to wait for, all of one rank.
        has_plain: True if it also depends on plain futures, without a work.
    """

    def __init__(self, works: Sequence[FutureSource], *, has_plain: bool = False) -> None:
        super().__init__()
        self.works = works
        self.has_plain = has_plain
        # Not in torch's own list, because they need the works' memory while they run.
        self._callbacks: list[Callable[[], None]] = []

    def wait(self) -> Any:
        """Wait for all works and return the result. Other ranks run meanwhile."""
        self.wait_for_works()
        return super().wait()

    def wait_for_works(self) -> None:
        """Wait for all works, even if the result is an exception."""
        # A work that has landed returns at once.
        for work in self.works:
            work.wait()

    def done(self) -> bool:
        """Return True if the result is known, which is no wait; otherwise let other ranks run."""
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
                "expected a future that is done, got value() of one that is not. "
                "Call wait(), which returns the value."
            )
        return super().value()

    def then(self, callback: Callable[[torch.futures.Future], Any]) -> SimFuture:
        """Return a future of the callback's result. A wait for it waits for the works."""
        child = SimFuture(self.works, has_plain=self.has_plain)
        self._add(lambda: child.complete(lambda: self._call(callback)))
        return child

    def add_done_callback(self, callback: Callable[[torch.futures.Future], Any]) -> None:
        """Call back when done. Errors of the callback are printed, because nothing waits for it."""

        def run() -> None:
            try:
                self._call(callback)
                # The world's own end must reach the rank.
            except WorldFailure:
                raise
            except Exception:  # noqa: BLE001
                traceback.print_exc()

        self._add(run)

    def complete(self, result: Callable[[], Any]) -> None:
        """Set the result or exception of a function, then run the callbacks."""
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
        # Taken out first, because a callback may add others.
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def when_done(self, action: Callable[[], None]) -> None:
        """Run an action once the result is known, without the works' memory."""
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
        """Call a callback. Its exception is wrapped like in torch."""
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
    """Return a future of a list of futures, done when all are.

    Args:
        futures: At least one, some of them of works.
    """
    of_works = [each for each in futures if isinstance(each, SimFuture)]
    # Ordered and without duplicates: a deterministic order of waits.
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
    # `value` raises the exception of a failed future.
    for future in futures:
        future.value()
    return list(futures)
