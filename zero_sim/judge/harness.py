"""Harness time: the harness's own part of a rank's turn, kept apart from the system's.

Judge and workload run in the ranks' threads, between the system's own calls. What fails there says
nothing about the system, and how long it takes is not the system's time. Inside the judge, in turn,
whatever it asks the engine is the system's again.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Protocol

from zero_sim.errors import EnvironmentProblem, UntrainableError, ZeroSimError

OnError = Callable[[BaseException], None] | None
"""Called with an exception that leaves a block; may raise another one."""


class PauseClock(Protocol):
    """Makes blocks in which the calling rank's time is not its program's: `World.pause_clock`."""

    def __call__(
        self, pause: bool, *, watched: bool = True, on_error: OnError = None
    ) -> AbstractContextManager[object]:
        """Make a block.

        Args:
            pause: False if its time counts again, within a block in which it does not.
            watched: False if no race is charged to the program.
            on_error: Translates exceptions.
        """
        ...


class JudgeFailed(ZeroSimError):
    """The judge, the reference or the workload raised: nothing is said about the system."""

    def __init__(self, error: Exception, traceback_text: str) -> None:
        self.error = error
        self.traceback_text = traceback_text
        super().__init__(f"the judge itself failed: {type(error).__name__}: {error}")


class _SystemRaised(Exception):
    """An engine raised when the judge asked it something."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        super().__init__(str(error))


_COME_THROUGH = (EnvironmentProblem, UntrainableError)


@contextmanager
def untimed(pause: bool, *, watched: bool = True, on_error: OnError = None) -> Iterator[None]:
    """Make a block where no world counts time; as `PauseClock`."""
    try:
        yield
    except BaseException as error:
        if on_error is not None:
            on_error(error)
        raise


class RankTime:
    """Blocks of the harness within a rank's turn, and blocks of the engine within those.

    Args:
        pause_clock: Makes all of them.
    """

    def __init__(self, pause_clock: PauseClock = untimed) -> None:
        self._pause_clock = pause_clock
        # What the judge reads is not charged to the system, whatever is in flight.
        self.harness = partial(pause_clock, True, watched=False, on_error=_raise_as_harness)
        """Make a block that is the harness's own.

        It raises JudgeFailed for any exception, except for what the machine lacks, what no system
        could train, and what an engine raised in `engine`: these pass unchanged.
        """
        self.engine = partial(pause_clock, False, on_error=_raise_as_engine)
        """Make a block for a query of an engine, inside `harness`: the system's own time again."""

    @contextmanager
    def caused_by_harness(self) -> Iterator[None]:
        """Make a block of the system's own time whose calls the harness caused."""
        with self._pause_clock(True), self._pause_clock(False):
            yield


def _raise_as_harness(error: BaseException) -> None:
    if isinstance(error, _SystemRaised):
        raise error.error from error.error.__cause__
    if isinstance(error, Exception) and not isinstance(error, _COME_THROUGH):
        raise JudgeFailed(error, traceback.format_exc()) from error


def _raise_as_engine(error: BaseException) -> None:
    if isinstance(error, Exception):
        raise _SystemRaised(error) from error
