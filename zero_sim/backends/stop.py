"""The end of long work: no further case begins after so long, or after Ctrl-C or SIGTERM."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from zero_sim.host.signals import interrupt, listening


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
    """Take a signal that ends a command as a wish to end after the case at hand, a second at once.

    Only the main thread of a process is told of signals; in any other this does nothing.

    Args:
        stop: What is asked.
    """

    def ask() -> None:
        if stop.asked:
            interrupt()
        stop.asked = True

    with listening(ask):
        yield
