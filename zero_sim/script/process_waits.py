"""Waits for pipes and locks of multiprocessing, in which other ranks get their turns.

A rank that blocked in the operating system would keep the baton, so that whoever is to send never
runs. It polls instead.
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import synchronize
from multiprocessing.connection import Connection
from typing import Any, Protocol
from unittest import mock

from zero_sim.sim import WorldFailure
from zero_sim.sim.callsite import here
from zero_sim.sim.world.rank_threads import is_forked, rank_state

_POLL_SECONDS = 0.001
_PIPE = "to receive from a pipe"
_PIPES = "for pipes or processes"
_LOCK = "for a lock of multiprocessing"


class Starter(Protocol):
    """The thread that starts ranks, in which no rank can wait for it."""

    def is_running(self) -> bool:
        """True in that thread."""
        ...

    def run(self) -> None:
        """Run the ranks that it started and that have not run yet."""
        ...


class MessageNeverCame(WorldFailure):
    """A rank waits for a message, or a lock, of another process.

    Args:
        rank: World rank.
        doing: The wait in words.
        seconds: How long it waited.
        site: Place of the wait, `file:line`.
    """

    def __init__(self, rank: int, doing: str, *, seconds: float, site: str) -> None:
        self.rank = rank
        super().__init__(
            f"rank {rank} waits {doing} at {site}, for more than {seconds:g} seconds\n"
            "Send what ranks need before the starter waits for them: it waits until they end."
        )


@dataclass(eq=False)
class _Awaited:
    doing: str
    done: bool = False
    waiters: list[int] = field(default_factory=list)
    missing: tuple[int, ...] = ()


def await_in_rank(
    is_ready: Callable[[], bool], doing: str, *, seconds: float | None, stall_seconds: float
) -> bool:
    """Let other ranks run until something is ready; False if it was not in time.

    Args:
        is_ready: Polls it.
        doing: The wait in words.
        seconds: Longest wait; None for no limit.
        stall_seconds: Time after which a wait without limit is an error.

    Raises:
        Deadlock: No other rank can run, and it is not ready after a second.
        MessageNeverCame: It is not ready after `stall_seconds`.
    """
    run: Any = rank_state.run
    rank, begun = rank_state.rank, time.monotonic()
    assert rank is not None
    awaited = _Awaited(doing)
    while not is_ready():
        passed = time.monotonic() - begun
        if seconds is not None and passed >= seconds:
            return False
        if seconds is None and passed >= stall_seconds:
            raise run.fail(MessageNeverCame(rank, doing, seconds=stall_seconds, site=here()))
        run.baton.advance()
        # Some other process may be the sender: a turn of other ranks takes no time.
        time.sleep(_POLL_SECONDS)
        run.baton.poll(rank, awaited, here())
    return True


@contextlib.contextmanager
def waits_of_ranks(starter: Starter, *, stall_seconds: float) -> Iterator[None]:
    """Let waits for other processes poll in ranks, and in their starter run the ranks first.

    Args:
        starter: Knows which thread started the ranks.
        stall_seconds: Time after which a wait without limit is an error.
    """
    receive, receive_bytes, poll = Connection.recv, Connection.recv_bytes, Connection.poll
    wait = multiprocessing.connection.wait
    semaphore: Any = synchronize.SemLock
    make_methods = semaphore._make_methods

    def pause(is_ready: Callable[[], bool], doing: str, seconds: float | None = None) -> bool:
        """Poll in a rank; False where the wait is to be left to the operating system."""
        if starter.is_running():
            if not is_ready():
                starter.run()
            return False
        if rank_state.rank is None or is_forked():
            return False
        await_in_rank(is_ready, doing, seconds=seconds, stall_seconds=stall_seconds)
        return True

    def receive_in_rank(connection: Connection) -> Any:
        pause(lambda: poll(connection, 0), _PIPE)
        return receive(connection)

    def receive_bytes_in_rank(connection: Connection, *args: Any) -> bytes:
        pause(lambda: poll(connection, 0), _PIPE)
        return receive_bytes(connection, *args)

    def poll_in_rank(connection: Connection, timeout: float | None = 0.0) -> bool:
        may_wait = timeout is None or timeout > 0
        if may_wait and pause(lambda: poll(connection, 0), _PIPE, timeout):
            timeout = 0
        return poll(connection, timeout)  # pyrefly: ignore [bad-argument-type]

    def wait_in_rank(objects: Any, timeout: float | None = None) -> list[Any]:
        objects = list(objects)
        may_wait = timeout is None or timeout > 0
        if may_wait and pause(lambda: bool(wait(objects, 0)), _PIPES, timeout):
            timeout = 0
        return wait(objects, timeout)

    def make_methods_in_rank(lock: Any) -> None:
        make_methods(lock)
        acquire = lock.acquire

        # `acquire` polls with False: a lock that was taken by the poll is held by this thread.
        def acquire_in_rank(block: bool = True, timeout: float | None = None) -> bool:
            if acquire(False):
                return True
            held = []
            if block and pause(lambda: acquire(False) and not held.append(True), _LOCK, timeout):
                return bool(held)
            return bool(held) or acquire(block, timeout)

        lock.acquire = acquire_in_rank

    with (
        mock.patch.object(Connection, "recv", receive_in_rank),
        mock.patch.object(Connection, "recv_bytes", receive_bytes_in_rank),
        mock.patch.object(Connection, "poll", poll_in_rank),
        mock.patch.object(multiprocessing.connection, "wait", wait_in_rank),
        mock.patch.object(semaphore, "_make_methods", make_methods_in_rank),
        mock.patch.object(semaphore, "__enter__", lambda lock: lock.acquire()),
    ):
        yield
