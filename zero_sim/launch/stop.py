"""When to begin no further case: after so long, or once somebody presses Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType


@dataclass(slots=True)
class Stop:
    """When to begin no further case."""

    deadline: float | None = None
    """On the clock of `time.monotonic`."""
    asked: bool = False

    @property
    def now(self) -> bool:
        """Whether that is now."""
        return self.asked or (self.deadline is not None and time.monotonic() >= self.deadline)


@contextlib.contextmanager
def interrupts_ask(stop: Stop) -> Iterator[None]:
    """Take an interrupt (SIGINT) as a wish to end after the case at hand, a second one at once.

    Only the main thread of a process is told of interrupts; in any other this does nothing.

    Args:
        stop: What is asked.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
