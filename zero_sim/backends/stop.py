"""The end of long work: no case starts after a deadline, Ctrl-C or SIGTERM."""

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
    """Deadline on the `time.monotonic` clock; None for none."""
    requested: bool = False

    @property
    def now(self) -> bool:
        """True if no further case should start."""
        return self.requested or (self.deadline is not None and time.monotonic() >= self.deadline)


@contextlib.contextmanager
def interrupts_ask(stop: Stop) -> Iterator[None]:
    """Stop after the current case at the first signal that ends a command, at once at the second.

    Does nothing outside the main thread, because Python delivers signals only there.
    """

    def request() -> None:
        # A case may take long, so the second signal does not wait for it.
        if stop.requested:
            interrupt()
        stop.requested = True

    with listening(request):
        yield
