"""Signals that end a command: Ctrl-C, SIGTERM of who manages jobs, SIGHUP of a terminal that goes.

All of them ask for the same. One that is ignored, as `nohup` ignores SIGHUP, stays ignored.
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
"""What a process sends to its workers in place of those, which reach a whole group at once."""
SAME_SECONDS = 0.5
"""Signals so close are one: `timeout` and job managers send it to a process and to its group."""

_last_heard = -SAME_SECONDS
_heard_count = 0
_heard_name = ""
_has_owner = False
_at_second: Callable[[], None] | None = None


def heard_count() -> int:
    """How many signals that end a command have come while something listened."""
    return _heard_count


def heard_name() -> str:
    """The signal that was heard last, such as `SIGTERM`; empty where none was."""
    return _heard_name


def at_second(call: Callable[[], None]) -> None:
    """What to call when a second signal comes to this process, before it is answered.

    For a process that runs one command: what the answer raises may have to wait for threads that
    do not end.
    """
    global _at_second
    _at_second = call


@contextlib.contextmanager
def listening(answer: Callable[[], None]) -> Iterator[None]:
    """Call a function when a signal comes that ends a command.

    Only the main thread of a process is told of signals; in any other this does nothing.

    Args:
        answer: Called in the main thread, in the midst of whatever it does; it may raise.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def hear(number: int, frame: FrameType | None) -> None:
        global _last_heard, _heard_count, _heard_name
        now = time.monotonic()
        if now - _last_heard < SAME_SECONDS:
            return
        _last_heard = now
        _heard_count += 1
        _heard_name = signal.Signals(number).name
        if _heard_count > 1 and _at_second is not None:
            _at_second()
        answer()

    # None is what was not set from Python, and could not be set again.
    listened = [
        number for number in ENDING if signal.getsignal(number) not in (signal.SIG_IGN, None)
    ]
    # To a process without an owner that signal means nothing: who sends it takes it for another.
    if _has_owner:
        listened.append(FROM_OWNER)
    before = {number: signal.signal(number, hear) for number in listened}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interrupt() -> None:
    """What an interrupt does: raise.

    Raises:
        KeyboardInterrupt: Always.
    """
    raise KeyboardInterrupt


def leave_to_owner() -> None:
    """Let signals pass that reach a whole group: who started this process says what follows."""
    global _has_owner
    _has_owner = True
    for number in (*ENDING, FROM_OWNER):
        signal.signal(number, signal.SIG_IGN)
