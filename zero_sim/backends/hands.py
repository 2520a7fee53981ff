"""Processes that take one call at a time; one that dies costs the call that it was at, no other."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from typing import Generic, TypeVar

from zero_sim.backends.lifeline import end_with_parent
from zero_sim.host.signals import ENDING, FROM_OWNER, leave_to_owner
from zero_sim.host.warnings_once import tell_once

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
        """Ask the process to end its call, if it is at work and listens."""
        if not self.is_free:
            self._signal(FROM_OWNER)

    def close(self) -> None:
        """End the process, which is idle now or to be given up."""
        is_free = self.is_free
        self._executor.shutdown(wait=is_free, cancel_futures=True)
        if not is_free:
            self._signal(signal.SIGKILL)
        self._running = None

    def _signal(self, number: int) -> None:
        if self._pid.done() and self._pid.exception() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid.result(), number)


def share_out(
    call: Callable[..., Answer], tasks: Sequence[tuple[object, ...]], *, jobs: int
) -> Generator[tuple[int, Future[Answer]], None, None]:
    """Make calls on several processes at once; yield each as it ends.

    Closing the iterator ends the processes; a call is begun only while it is asked for the next.

    Args:
        call: A function of a module; what it takes and gives can be pickled.
        tasks: What each call takes, in the order in which they are begun.
        jobs: Most processes.

    Yields:
        The place of a call in `tasks`, and its future, which is done: it raises `BrokenExecutor`
        if the process died with it.
    """
    hands = [Hand[Answer]() for _ in range(min(jobs, len(tasks)))]
    running: dict[Future[Answer], int] = {}
    waiting = iter(enumerate(tasks))
    try:
        while True:
            for hand in hands:
                if hand.is_free and (task := next(waiting, None)) is not None:
                    place, arguments = task
                    running[hand.submit(call, *arguments)] = place
            if not running:
                return
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(done), done
    finally:
        for hand in hands:
            hand.close()


def _start() -> tuple[Executor, Future[int]]:
    """A process that signals to the whole group do not reach, and its id."""
    # A fork of a process with threads and torch in it would hang.
    executor = ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn"), initializer=_begin
    )
    # That a signal is ignored is inherited, so that none comes too early.
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
    try:
        return executor, executor.submit(os.getpid)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _begin() -> None:
    end_with_parent()
    leave_to_owner()
    tell_once()
