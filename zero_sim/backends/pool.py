"""Pools that take calls, some at a time: this process, processes of their own, a Dask cluster.

Whatever happens to one worker costs the call that it was at and no other. Ranks of a real backend,
which run one job together, are `Teams`.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    wait,
)
from multiprocessing import connection
from typing import Any, Generic, Protocol, TypeVar

from zero_sim.errors import EnvironmentProblem
from zero_sim.host.garbage import collect_seldom
from zero_sim.host.signals import ENDING, FROM_OWNER, leave_to_owner
from zero_sim.host.warnings_once import tell_once

Answer = TypeVar("Answer")

CONNECT_SECONDS = 30


class Pool(Protocol):
    """Takes calls, some at a time."""

    slots: int
    """How many it takes at a time."""

    def submit(self, call: Callable[..., Answer], *arguments: object) -> Future[Answer]:
        """Begin a call where one is free; the future fails if its worker dies.

        Args:
            call: A function of a module; what it takes and gives can be pickled.
            arguments: What it takes.
        """
        ...

    def prepare(self, call: Callable[..., object], *arguments: object) -> None:
        """Make a call in every process that is there beforehand, this one included."""
        ...

    def interrupt(self) -> None:
        """Ask calls that are running to come to an end."""
        ...


class OwnProcess:
    """Makes a call at a time in this process, before `submit` comes back."""

    slots = 1

    def submit(self, call: Callable[..., Answer], *arguments: object) -> Future[Answer]:
        """Make a call, which raises here what it raises."""
        future: Future[Answer] = Future()
        future.set_result(call(*arguments))
        return future

    def prepare(self, call: Callable[..., object], *arguments: object) -> None:
        """Make it here."""
        call(*arguments)

    def interrupt(self) -> None:
        """Nothing runs when this can be called."""


class Processes:
    """Processes of their own on this machine, a new one for each that dies; to be closed.

    Args:
        slots: Number of processes.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._workers = [_Worker[Any]() for _ in range(slots)]

    @property
    def has_free(self) -> bool:
        """Whether any is at no call."""
        return any(worker.is_free for worker in self._workers)

    def submit(self, call: Callable[..., Answer], *arguments: object) -> Future[Answer]:
        """Begin a call on a process that is free."""
        return next(worker for worker in self._workers if worker.is_free).submit(call, *arguments)

    def prepare(self, call: Callable[..., object], *arguments: object) -> None:
        """Make it here, where what is wrong is raised, and in every process."""
        call(*arguments)
        # A process that dies is replaced when it is given its next call.
        wait([worker.submit(call, *arguments) for worker in self._workers])

    def interrupt(self) -> None:
        """Send every process at work an interrupt."""
        for worker in self._workers:
            worker.interrupt()

    def close(self) -> None:
        """End the processes, which are idle now or to be given up."""
        for worker in self._workers:
            worker.close()


class Cluster:
    """Workers of a Dask cluster; a call of a worker that dies is not retried.

    Args:
        executor: The cluster, as an executor.
        slots: Number of calls at a time.
    """

    def __init__(self, executor: Executor, *, slots: int) -> None:
        self._executor = executor
        self.slots = slots
        self._running: list[Future[Any]] = []

    def submit(self, call: Callable[..., Answer], *arguments: object) -> Future[Answer]:
        """Begin a call on some worker."""
        future = self._executor.submit(call, *arguments)
        self._running = [other for other in self._running if not other.done()] + [future]
        return future

    def prepare(self, call: Callable[..., object], *arguments: object) -> None:
        """Nothing: each worker begins with its first call."""

    def interrupt(self) -> None:
        """Give up what runs: a cluster has no interrupts."""
        for future in self._running:
            future.cancel()


@contextlib.contextmanager
def connected(scheduler: str, *, slots: int | None) -> Iterator[Cluster]:
    """A Dask cluster.

    Args:
        scheduler: Address of its scheduler.
        slots: Calls at a time; all that it has workers for where left out.

    Raises:
        EnvironmentProblem: The cluster cannot be used.
    """
    try:
        connect = importlib.import_module("distributed").Client
    except ModuleNotFoundError:
        raise EnvironmentProblem(
            "expected the package 'distributed' for --scheduler, which is not installed. "
            "Try `pip install zero-sim[cluster]`, or --jobs."
        ) from None
    try:
        client = connect(scheduler, timeout=CONNECT_SECONDS)
    except (OSError, ValueError) as error:
        raise EnvironmentProblem(
            f"expected a Dask scheduler at {scheduler!r}, got {error}. Try `dask scheduler`, which "
            "says its address."
        ) from None
    with client:
        cores = sum(client.ncores().values())
        if not cores:
            raise EnvironmentProblem(
                f"expected workers at {scheduler!r}, got none. Try `dask worker {scheduler}`."
            )
        # Two calls in one process would stand in the way of each other's ranks.
        executor = client.get_executor(pure=False, retries=0)
        yield Cluster(executor, slots=slots or len(client.ncores()))


def is_lost(error: BaseException) -> bool:
    """Whether an error of a call says that its worker is gone, not what the call did."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, CancelledError) or bool(names & {"BrokenExecutor", "KilledWorker"})


class _Worker(Generic[Answer]):
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
    running: dict[Future[Answer], int] = {}
    waiting = iter(enumerate(tasks))
    with contextlib.closing(Processes(min(jobs, len(tasks)))) as processes:
        while True:
            while processes.has_free and (task := next(waiting, None)) is not None:
                place, arguments = task
                running[processes.submit(call, *arguments)] = place
            if not running:
                return
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(done), done


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
    collect_seldom()
    end_with_parent()
    leave_to_owner()
    tell_once()


def end_with_parent() -> None:
    """Let this process end as soon as its parent has; does nothing where nobody started it.

    A pool of `concurrent.futures` whose owner is killed leaves its workers behind: each holds the
    pipe open that would tell the others.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        connection.wait([parent.sentinel])
        # Nobody is left to hear of what runs here, nor to wait for it.
        os._exit(1)

    threading.Thread(target=watch, name="parent-watchdog", daemon=True).start()
