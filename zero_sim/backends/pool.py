"""Pools that run several calls at once: this process, own processes, or a Dask cluster.

If a worker dies, only its current call fails. Ranks of a real backend run jobs together, so they
are in `Teams`.
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
from zero_sim.host.warnings_once import show_warnings_once

Answer = TypeVar("Answer")

# A running scheduler answers at once, so this only bounds the wait at a wrong address.
CONNECT_SECONDS = 30


class Pool(Protocol):
    """Pool that runs several calls at once."""

    slots: int
    """Calls at once."""

    def submit(self, call: Callable[..., Answer], *arguments: object) -> Future[Answer]:
        """Start a call on a free worker. The future fails if the worker dies.

        The call must be a function of a module, with picklable arguments and result.
        """
        ...

    def prepare(self, call: Callable[..., object], *arguments: object) -> None:
        """Make a call in this process, and in every existing worker process."""
        ...

    def interrupt(self) -> None:
        """Interrupt running calls."""
        ...


class OwnProcess:
    """Pool in this process. A call ends before `submit` returns."""

    slots = 1

    def submit(self, call: Callable[..., Answer], *arguments: object) -> Future[Answer]:
        """Make a call. Its exceptions are raised here."""
        future: Future[Answer] = Future()
        future.set_result(call(*arguments))
        return future

    def prepare(self, call: Callable[..., object], *arguments: object) -> None:
        """Make the call here."""
        call(*arguments)

    def interrupt(self) -> None:
        """Do nothing, because no call can be running."""


class Processes:
    """Process pool on this machine. Dead processes are replaced. Must be closed."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._workers = [_Worker[Any]() for _ in range(slots)]

    @property
    def has_free(self) -> bool:
        """True if a process is free."""
        return any(worker.is_free for worker in self._workers)

    def submit(self, call: Callable[..., Answer], *arguments: object) -> Future[Answer]:
        """Start a call on a free process."""
        return next(worker for worker in self._workers if worker.is_free).submit(call, *arguments)

    def prepare(self, call: Callable[..., object], *arguments: object) -> None:
        """Make the call here, where an error is raised, and in every process."""
        call(*arguments)
        # Ignore dead processes. Each is replaced at its next call.
        wait([worker.submit(call, *arguments) for worker in self._workers])

    def interrupt(self) -> None:
        """Interrupt every busy process."""
        for worker in self._workers:
            worker.interrupt()

    def close(self) -> None:
        """End all processes, and abandon running calls."""
        for worker in self._workers:
            worker.close()


class Cluster:
    """Pool of a Dask cluster's workers. If a worker dies, its call is not retried."""

    def __init__(self, executor: Executor, *, slots: int) -> None:
        self._executor = executor
        self.slots = slots
        self._running: list[Future[Any]] = []

    def submit(self, call: Callable[..., Answer], *arguments: object) -> Future[Answer]:
        """Start a call on any worker."""
        future = self._executor.submit(call, *arguments)
        self._running = [other for other in self._running if not other.done()] + [future]
        return future

    def prepare(self, call: Callable[..., object], *arguments: object) -> None:
        """Do nothing, because each worker starts with its first call."""

    def interrupt(self) -> None:
        """Cancel running calls, because a cluster has no interrupts."""
        for future in self._running:
            future.cancel()


@contextlib.contextmanager
def connected(scheduler: str, *, slots: int | None) -> Iterator[Cluster]:
    """Connect to a Dask cluster, and yield it as a pool with a slot per worker by default.

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
            "prints its address."
        ) from None
    with client:
        cores = sum(client.ncores().values())
        if not cores:
            raise EnvironmentProblem(
                f"expected workers at {scheduler!r}, got none. Try `dask worker {scheduler}`."
            )
        # One call per process, because two would disturb each other's ranks.
        executor = client.get_executor(pure=False, retries=0)
        yield Cluster(executor, slots=slots or len(client.ncores()))


def is_lost(error: BaseException) -> bool:
    """Return True if the worker is gone, False if its call failed."""
    # By name, because Dask's classes cannot be imported without Dask.
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, CancelledError) or bool(names & {"BrokenExecutor", "KilledWorker"})


class _Worker(Generic[Answer]):
    """A process, replaced if it dies; must be closed."""

    # A pool breaks as a whole if a process dies, so each process has its own pool.
    def __init__(self) -> None:
        self._running: Future[Answer] | None = None
        self._executor, self._pid = _start()

    @property
    def is_free(self) -> bool:
        """True if no call runs."""
        return self._running is None or self._running.done()

    def submit(self, call: Callable[..., Answer], *arguments: object) -> Future[Answer]:
        """Start a call. The future fails if the process dies."""
        # A dead process breaks its executor for good.
        if self._running is not None and self._running.exception() is not None:
            self.close()
            self._executor, self._pid = _start()
        self._running = self._executor.submit(call, *arguments)
        return self._running

    def interrupt(self) -> None:
        """Interrupt the running call, if there is one."""
        if not self.is_free:
            self._signal(FROM_OWNER)

    def close(self) -> None:
        """End the process, and abandon a running call."""
        is_free = self.is_free
        # Do not wait for a busy worker. It is killed below.
        self._executor.shutdown(wait=is_free, cancel_futures=True)
        if not is_free:
            self._signal(signal.SIGKILL)
        self._running = None

    def _signal(self, number: int) -> None:
        # A process has no id before it starts. If it died early, it never gets an id.
        if self._pid.done() and self._pid.exception() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid.result(), number)


def share_out(
    call: Callable[..., Answer], tasks: Sequence[tuple[object, ...]], *, jobs: int
) -> Generator[tuple[int, Future[Answer]], None, None]:
    """Make calls on several processes, and yield each call when it ends.

    `tasks` are the arguments of each call, in starting order. Calls only start while a result is
    requested. Closing the iterator ends the processes. For `call`, see `Pool.submit`.

    Yields:
        Index in `tasks`, and the finished future, which raises `BrokenExecutor` if the process
        died.
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
    """Start a process out of reach of signals to the process group. Return it with its id."""
    # By spawn, because forking a process with threads and torch would hang.
    executor = ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn"), initializer=_begin
    )
    # The new process inherits ignored signals, so none can end it before `_begin` runs.
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
    show_warnings_once()


def end_with_parent() -> None:
    """End this process when its parent ends. Does nothing in a process without a parent.

    If the owner of a `concurrent.futures` pool is killed, its workers stay, because each worker
    keeps the pipe open whose end the others wait for.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        connection.wait([parent.sentinel])
        # Nobody reads results or exceptions any more.
        os._exit(1)

    threading.Thread(target=watch, name="parent-watchdog", daemon=True).start()
