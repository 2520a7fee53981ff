"""Accounting of harness time within a rank's turn.

Judge and workload run in the ranks' threads, between calls of the system. Their failures and their
time must not be charged to the system. Calls of the engine within the judge are the system's time.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Protocol

from zero_sim.errors import EnvironmentProblem, UntrainableError, ZeroSimError

OnError = Callable[[BaseException], None] | None
"""Called with an exception that leaves a block; may raise another."""


class PauseClock(Protocol):
    """Makes blocks that stop the clock of the calling rank's program: `World.pause_clock`."""

    def __call__(
        self, pause: bool, *, watched: bool = True, on_error: OnError = None
    ) -> AbstractContextManager[object]:
        """Make a block.

        Args:
            pause: True to stop the clock; False to let it run within a block that stopped it.
            watched: False to ignore races.
            on_error: Translates exceptions.
        """
        ...


class JudgeFailed(ZeroSimError):
    """The judge, the reference or the workload raised, so the system was not judged."""

    def __init__(self, error: Exception, traceback_text: str) -> None:
        self.error = error
        self.traceback_text = traceback_text
        super().__init__(f"the judge itself failed: {type(error).__name__}: {error}")


class _SystemRaised(Exception):
    """An engine raised in a call from the judge."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        super().__init__(str(error))


# Not errors of the harness: the user can fix both.
_COME_THROUGH = (EnvironmentProblem, UntrainableError)


@contextmanager
def untimed(pause: bool, *, watched: bool = True, on_error: OnError = None) -> Iterator[None]:
    """Make a block without a clock, for worlds that measure no time; as `PauseClock`."""
    try:
        yield
    except BaseException as error:
        if on_error is not None:
            on_error(error)
        # Reached if `on_error` did not raise another exception.
        raise


class RankTime:
    """Blocks of the harness within a rank's turn, and blocks of the engine within those.

    Args:
        pause_clock: Makes the blocks.
    """

    def __init__(self, pause_clock: PauseClock = untimed) -> None:
        self._pause_clock = pause_clock
        # Reads of the judge are not races of the system, even on buffers in flight.
        self.harness = partial(pause_clock, True, watched=False, on_error=_raise_as_harness)
        """Make a block of the harness.

        Exceptions become JudgeFailed, except missing resources, untrainable cases, and errors of an
        engine in `engine`: these pass unchanged.
        """
        self.engine = partial(pause_clock, False, on_error=_raise_as_engine)
        """Make a block for a call of an engine, inside `harness`: the system's time again."""

    @contextmanager
    def caused_by_harness(self) -> Iterator[None]:
        """Make a block of system time for calls that the harness caused."""
        with self._pause_clock(True), self._pause_clock(False):
            yield


def _raise_as_harness(error: BaseException) -> None:
    if isinstance(error, _SystemRaised):
        # Unwrap what `_raise_as_engine` wrapped: the system's own error.
        raise error.error from error.error.__cause__
    if isinstance(error, Exception) and not isinstance(error, _COME_THROUGH):
        # Only Exception: other exceptions stop the rank and are no failure of the judge.
        raise JudgeFailed(error, traceback.format_exc()) from error


def _raise_as_engine(error: BaseException) -> None:
    # Wrapped, so that the harness block around it can tell it from its own errors.
    if isinstance(error, Exception):
        raise _SystemRaised(error) from error
