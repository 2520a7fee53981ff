"""Harness time: the harness's own part of a rank's turn, kept apart from the system's.

Judge and workload run in the ranks' threads, between the system's own calls. What fails there says
nothing about the system, and how long it takes is not the system's time. Inside the judge, in turn,
whatever it asks the engine is the system's again.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

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


@contextmanager
def harness_time(pause_clock: PauseClock) -> Iterator[None]:
    """A block that is the harness's own.

    Raises:
        JudgeFailed: Anything in it raised, but for what the machine lacks, what no system could
            train and what an engine raised when it was asked: those come through as they are.
    """
    try:
        # What the judge reads is not charged to the system either, whatever is in flight.
        with pause_clock(True), unwatched():
            yield
    except _SystemRaised as raised:
        raise raised.error from raised.error.__cause__
    except (EnvironmentProblem, UntrainableError):
        raise
    except Exception as error:
        raise JudgeFailed(error, traceback.format_exc()) from error


@contextmanager
def engine_time(pause_clock: PauseClock) -> Iterator[None]:
    """A block in which an engine is asked something, inside one that is ours: the system's again.

    Args:
        pause_clock: As for `harness_time`.
    """
    with pause_clock(False):
        try:
            yield
        except Exception as error:
            raise _SystemRaised(error) from error
