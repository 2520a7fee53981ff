"""Processes that take one call at a time; one that dies costs the call that it was at, no other."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from typing import Generic, TypeVar

from zero_sim.launch.lifeline import end_with_parent

Answer = TypeVar("Answer")


class Hand(Generic[Answer]):
    """A process of its own, and a new one in its place if it dies; to be closed."""

    # A pool breaks as a whole if a process of it dies, so each is a pool of one.
    def __init__(self) -> None:
        self._running: Future[Answer] | None = None
        self._executor, self._pid = _start()

    @property
    def is_free(self) -> bool:
        """Whether it is at no call."""
        return self._running is None or self._running.done()

    def submit(self, call: Callable[..., Answer], *arguments: object) -> Future[Answer]:
        """Begin a call; the future fails if the process dies.

        Args:
            call: A function of a module; what it takes and gives can be pickled.
            arguments: What it takes.
        """
        if self._running is not None and self._running.exception() is not None:
            self.close()
            self._executor, self._pid = _start()
        self._running = self._executor.submit(call, *arguments)
        return self._running

    def interrupt(self) -> None:
        """Send the process an interrupt, if it is at work."""
        if not self.is_free:
            self._signal(signal.SIGINT)

    def close(self) -> None:
        """End the process, which is idle now or to be given up."""
        is_free = self.is_free
        self._executor.shutdown(wait=is_free, cancel_futures=True)
        if not is_free:
            self._signal(signal.SIGTERM)
        self._running = None

    def _signal(self, number: int) -> None:
        if self._pid.done() and self._pid.exception() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid.result(), number)


def _start() -> tuple[Executor, Future[int]]:
    """A process that a Ctrl-C on the terminal does not reach, and its id."""
    # A fork of a process with threads and torch in it would hang.
    executor = ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn"), initializer=end_with_parent
    )
    # That a signal is ignored is inherited; what is called may listen for it while it runs.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return executor, executor.submit(os.getpid)
    finally:
        signal.signal(signal.SIGINT, before)
