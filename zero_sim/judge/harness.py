"""Harness time: the harness's own part of a rank's turn, kept apart from the system's.

Judge and workload run in the ranks' threads, between the system's own calls. What fails there says
nothing about the system, and how long it takes is not the system's time. Inside the judge, in turn,
whatever it asks the engine is the system's again.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType

from zero_sim.errors import EnvironmentProblem, UntrainableError, ZeroSimError
from zero_sim.sim import unwatched

PauseClock = Callable[[bool], AbstractContextManager[object]]
"""Makes a block in which the calling rank's time is not its program's; or is again, given False."""


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


def harness_time(pause_clock: PauseClock) -> AbstractContextManager[None]:
    """A block that is the harness's own.

    Raises:
        JudgeFailed: Anything in it raised, but for what the machine lacks, what no system could
            train and what an engine raised when it was asked: those come through as they are.
    """
    return _HarnessTime(pause_clock)


def engine_time(pause_clock: PauseClock) -> AbstractContextManager[None]:
    """A block in which an engine is asked something, inside one that is ours: the system's again.

    Args:
        pause_clock: As for `harness_time`.
    """
    return _EngineTime(pause_clock)


@contextmanager
def caused_by_harness(pause_clock: PauseClock) -> Iterator[None]:
    """A block of the system's own time whose calls it would not make without the harness."""
    with pause_clock(True), pause_clock(False):
        yield


# No generators: a small case has hundreds of these blocks.
class _HarnessTime:
    __slots__ = ("_clock", "_watch")

    def __init__(self, pause_clock: PauseClock) -> None:
        self._clock = pause_clock(True)
        # What the judge reads is not charged to the system either, whatever is in flight.
        self._watch = unwatched()

    def __enter__(self) -> None:
        self._clock.__enter__()
        self._watch.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._watch.__exit__(kind, error, trace)
        self._clock.__exit__(kind, error, trace)
        if isinstance(error, _SystemRaised):
            raise error.error from error.error.__cause__
        if isinstance(error, Exception) and not isinstance(error, _COME_THROUGH):
            raise JudgeFailed(error, traceback.format_exc()) from error


class _EngineTime:
    __slots__ = ("_clock",)

    def __init__(self, pause_clock: PauseClock) -> None:
        self._clock = pause_clock(False)

    def __enter__(self) -> None:
        self._clock.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._clock.__exit__(kind, error, trace)
        if isinstance(error, Exception):
            raise _SystemRaised(error) from error
