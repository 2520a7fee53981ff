"""Accounting of harness time and failures within a rank's turn.

Judge and workload run in the ranks' threads, between the system's calls. Their time and failures
must not be charged to the system. When the judge calls an engine, the system's time runs again.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Protocol

from zero_sim.errors import EnvironmentProblem, UntrainableError, ZeroSimError

OnError = Callable[[BaseException], None] | None
"""Called with an exception that leaves a block; may raise another exception."""


class PauseClock(Protocol):
    """Makes blocks that stop the calling rank's clock, such as `World.pause_clock`."""

    def __call__(
        self, pause: bool, *, watched: bool = True, on_error: OnError = None
    ) -> AbstractContextManager[object]:
        """Make a block.

        Args:
            pause: True to stop the clock, False to let it run inside a block that stopped it.
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


# The user can fix these, so they are not harness errors.
_COME_THROUGH = (EnvironmentProblem, UntrainableError)


@contextmanager
def untimed(pause: bool, *, watched: bool = True, on_error: OnError = None) -> Iterator[None]:
    """A `PauseClock` for worlds that do not measure time."""
    try:
        yield
    except BaseException as error:
        if on_error is not None:
            on_error(error)
        # Only reached if `on_error` did not raise.
        raise


class RankTime:
    """Blocks for harness time in a rank's turn, and nested blocks for engine calls.

    Args:
        pause_clock: Makes the blocks.
    """

    def __init__(self, pause_clock: PauseClock = untimed) -> None:
        self._pause_clock = pause_clock
        # Reads by the judge are not the system's races, even on buffers in flight.
        self.harness = partial(pause_clock, True, watched=False, on_error=_raise_as_harness)
        """Make a block for harness code.

        Exceptions become JudgeFailed, except for EnvironmentProblem, UntrainableError, and
        exceptions from an `engine` block.
        """
        self.engine = partial(pause_clock, False, on_error=_raise_as_engine)
        """Make a block for an engine call, inside a `harness` block."""

    @contextmanager
    def caused_by_harness(self) -> Iterator[None]:
        """Make a block of system time for engine calls that the harness caused."""
        with self._pause_clock(True), self._pause_clock(False):
            yield


def _raise_as_harness(error: BaseException) -> None:
    if isinstance(error, _SystemRaised):
        # Unwrap the system's error, which `_raise_as_engine` wrapped.
        raise error.error from error.error.__cause__
    if isinstance(error, Exception) and not isinstance(error, _COME_THROUGH):
        # Only Exception: a BaseException stops the rank, so it is not a judge failure.
        raise JudgeFailed(error, traceback.format_exc()) from error


def _raise_as_engine(error: BaseException) -> None:
    # Wrap it, so that the outer harness block does not take it for a harness error.
    if isinstance(error, Exception):
        raise _SystemRaised(error) from error
