"""Waits for multiprocessing's pipes and locks that let other ranks run.

If a rank blocked in the operating system, it would keep the baton, and the sender could never run.
So ranks poll instead.
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

# Short, because a message between ranks takes at least one poll.
_POLL_SECONDS = 0.001
# Ends of the sentence "rank 3 waits ...".
_PIPE = "to receive from a pipe"
_PIPES = "for pipes or processes"
_LOCK = "for a lock of multiprocessing"


class Starter(Protocol):
    """Thread that starts ranks. It must run the ranks before it waits for them."""

    def is_running(self) -> bool:
        """Return True in this thread."""
        ...

    def run(self) -> None:
        """Run the ranks that have been started but have not run."""
        ...


class MessageNeverCame(WorldFailure):
    """A rank waited too long for a message or lock of another process.

    Args:
        rank: World rank.
        doing: Description of the wait, such as "to receive from a pipe".
        seconds: Length of the wait.
        site: Call site of the wait, `file:line`.
    """

    def __init__(self, rank: int, doing: str, *, seconds: float, site: str) -> None:
        self.rank = rank
        super().__init__(
            f"expected a message within {seconds:g} seconds, got none: rank {rank} waits {doing} "
            f"at {site}\n"
            "Send what ranks need before the starter waits for their end."
        )


@dataclass(eq=False)
class _Awaited:
    # The fields that a deadlock report reads. It is unknown which rank is missing, so none is
    # listed.
    doing: str
    done: bool = False
    waiters: list[int] = field(default_factory=list)
    missing: tuple[int, ...] = ()


def await_in_rank(
    is_ready: Callable[[], bool], doing: str, *, seconds: float | None, stall_seconds: float
) -> bool:
    """Let other ranks run until a condition holds; return False after a timeout.

    Args:
        is_ready: Returns True if the condition holds.
        doing: Description of the wait, for errors.
        seconds: Timeout; None for no timeout.
        stall_seconds: Time after which a wait without limit is an error.

    Raises:
        Deadlock: No other rank could run for a second.
        MessageNeverCame: The wait has no timeout and took `stall_seconds`.
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
        # The sender may be another process, which needs real time. Turns of ranks take none.
        time.sleep(_POLL_SECONDS)
        run.baton.poll(rank, awaited, here())
    return True


@contextlib.contextmanager
def waits_of_ranks(starter: Starter, *, stall_seconds: float) -> Iterator[None]:
    """Make waits for other processes poll in ranks. In the starter, run the ranks first.

    Args:
        starter: Thread that starts the ranks.
        stall_seconds: Time after which a wait without limit is an error.
    """
    receive, receive_bytes, poll = Connection.recv, Connection.recv_bytes, Connection.poll
    wait = multiprocessing.connection.wait
    semaphore: Any = synchronize.SemLock
    make_methods = semaphore._make_methods

    def pause(is_ready: Callable[[], bool], doing: str, seconds: float | None = None) -> bool:
        """Poll in a rank; return False if the original function must wait."""
        if starter.is_running():
            if not is_ready():
                starter.run()
            return False
        # Threads other than ranks block as usual, and so does a forked copy of a rank.
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

        # A successful poll by acquire(False) takes the lock already, so remember this.
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
        # The original __enter__ would use the C object, not the instance's `acquire`.
        mock.patch.object(semaphore, "__enter__", lambda lock: lock.acquire()),
    ):
        yield
