"""Signals that end a command: Ctrl-C, SIGTERM from a job manager, SIGHUP from a closed terminal.

All have the same effect. An ignored signal, such as SIGHUP under `nohup`, stays ignored.
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
"""Signal from a process to its workers. The others reach a whole process group at once."""
SAME_SECONDS = 0.5
"""A signal within this time after another is a repeat: `timeout` and job managers signal both a
process and its group."""

_last_heard = -SAME_SECONDS
_heard_count = 0
_heard_name = ""
_has_owner = False
_at_second: Callable[[], None] | None = None


def received_count() -> int:
    """Return the number of signals received in `listening`."""
    return _heard_count


def received_name() -> str:
    """Return the last received signal's name, such as `SIGTERM`; empty if there was none."""
    return _heard_name


def at_second(call: Callable[[], None]) -> None:
    """Set a function to call at the second signal, before `listening`'s `answer`.

    For a process that runs a single command: an exception raised in `answer` may have to wait for
    threads that do not end.
    """
    global _at_second
    _at_second = call


@contextlib.contextmanager
def listening(answer: Callable[[], None]) -> Iterator[None]:
    """Call `answer` at each signal that ends a command, between any two instructions.

    Does nothing outside the main thread, because Python delivers signals only there. `answer` may
    raise.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def receive(number: int, frame: FrameType | None) -> None:
        global _last_heard, _heard_count, _heard_name
        now = time.monotonic()
        # A repeat, sent to the process group.
        if now - _last_heard < SAME_SECONDS:
            return
        _last_heard = now
        _heard_count += 1
        _heard_name = signal.Signals(number).name
        if _heard_count > 1 and _at_second is not None:
            _at_second()
        answer()

    # None is a handler that Python did not set and cannot restore.
    listened = [
        number for number in ENDING if signal.getsignal(number) not in (signal.SIG_IGN, None)
    ]
    # Without an owner, SIGUSR1 has no meaning here and keeps its default effect.
    if _has_owner:
        listened.append(FROM_OWNER)
    before = {number: signal.signal(number, receive) for number in listened}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interrupt() -> None:
    """Raise KeyboardInterrupt."""
    raise KeyboardInterrupt


def leave_to_owner() -> None:
    """Ignore signals to the process group from now on, because the parent process handles them."""
    global _has_owner
    _has_owner = True
    # The owner's signal too: until `listening` has a handler, it would end the process.
    for number in (*ENDING, FROM_OWNER):
        signal.signal(number, signal.SIG_IGN)
