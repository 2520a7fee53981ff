"""Signals that end a command: Ctrl-C, SIGTERM from a job manager, SIGHUP from a closed terminal.

All of them have the same effect. An ignored one, such as SIGHUP under `nohup`, stays ignored.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FROM_OWNER = signal.SIGUSR1
"""Signal that a process sends to its workers. The others reach a whole process group at once."""
SAME_SECONDS = 0.5
"""Signals this close count as one: `timeout` and job managers signal a process and its group."""

_last_heard = -SAME_SECONDS
_heard_count = 0
_heard_name = ""
_has_owner = False
_at_second: Callable[[], None] | None = None


def heard_count() -> int:
    """Return the number of signals received while something listened."""
    return _heard_count


def heard_name() -> str:
    """Return the name of the last received signal, such as `SIGTERM`; empty if there was none."""
    return _heard_name


def at_second(call: Callable[[], None]) -> None:
    """Set a function to call at the second signal to this process, before its answer.

    For a process that runs one command: the exception raised by the answer may have to wait for
    threads that do not end.
    """
    global _at_second
    _at_second = call


@contextlib.contextmanager
def listening(answer: Callable[[], None]) -> Iterator[None]:
    """Call a function when a signal arrives that ends a command.

    Python delivers signals only to the main thread; in any other thread this does nothing.

    Args:
        answer: Called in the main thread, between any two of its instructions. May raise.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def hear(number: int, frame: FrameType | None) -> None:
        global _last_heard, _heard_count, _heard_name
        now = time.monotonic()
        # The same signal, sent to the process and again to its group.
        if now - _last_heard < SAME_SECONDS:
            return
        _last_heard = now
        _heard_count += 1
        _heard_name = signal.Signals(number).name
        if _heard_count > 1 and _at_second is not None:
            _at_second()
        answer()

    # None is a handler that was not set by Python, and cannot be restored by it.
    listened = [
        number for number in ENDING if signal.getsignal(number) not in (signal.SIG_IGN, None)
    ]
    # Without an owner SIGUSR1 has no meaning here, so it must keep its default effect.
    if _has_owner:
        listened.append(FROM_OWNER)
    before = {number: signal.signal(number, hear) for number in listened}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interrupt() -> None:
    """Raise the exception of an interrupt.

    Raises:
        KeyboardInterrupt: Always.
    """
    raise KeyboardInterrupt


def leave_to_owner() -> None:
    """Ignore signals to the process group from now on, because the parent process decides."""
    global _has_owner
    _has_owner = True
    # Until `listening` installs a handler for the owner's signal, it must not end the process.
    for number in (*ENDING, FROM_OWNER):
        signal.signal(number, signal.SIG_IGN)
