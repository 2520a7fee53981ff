"""The end of long work: no further case starts after a deadline, or after Ctrl-C or SIGTERM."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from zero_sim.host.signals import interrupt, listening


@dataclass(slots=True)
class Stop:
    """Condition to start no further case."""

    deadline: float | None = None
    """Deadline on the clock of `time.monotonic`; None for none."""
    asked: bool = False

    @property
    def now(self) -> bool:
        """True if no further case should start."""
        return self.asked or (self.deadline is not None and time.monotonic() >= self.deadline)


@contextlib.contextmanager
def interrupts_ask(stop: Stop) -> Iterator[None]:
    """Stop after the current case at the first signal that ends a command, at once at the second.

    Python delivers signals only to the main thread; in any other thread this does nothing.

    Args:
        stop: Set at the first signal.
    """

    def ask() -> None:
        # A case may take long, so a second signal must not wait for it.
        if stop.asked:
            interrupt()
        stop.asked = True

    with listening(ask):
        yield
