"""`zero-sim run` on real processes: own workers, or a launcher's processes."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from zero_sim.backends.torchrun import is_launched, place
from zero_sim.errors import ZeroSimError
from zero_sim.host import supervisor
from zero_sim.run import CaseResult
from zero_sim.run.real_judge import as_launched, on_workers
from zero_sim.run.setup import RealBackend, Setup, own_setup
from zero_sim.scenario.discover import Case
from zero_sim.scenario.spec import Scenario
from zero_sim.targets import import_target


class Session(Protocol):
    """Selects cases, and reports their results."""

    junit: Path | None
    """File for JUnit XML, if any. Only one process writes it."""

    def select(self, cases: Sequence[Case], why_left_out: Callable[[Scenario], str]) -> list[Case]:
        """Return the cases for which `why_left_out` has no reason."""
        ...

    def run(
        self,
        cases: Sequence[Case],
        judging: Callable[[], AbstractContextManager[Callable[[Scenario], CaseResult]]],
    ) -> int:
        """Judge cases and report their results; return the exit status."""
        ...


def run_on_processes(
    session: Session,
    cases: Sequence[Case],
    *,
    backend: RealBackend,
    native: bool,
    target: str | None = None,
    explainer: str,
) -> int:
    """Run cases with one process per rank.

    Args:
        session: Reports the results.
        cases: All selected cases. Cases that the backend cannot judge are omitted.
        backend: Carries the collectives.
        native: True if the backend adds in its own order, overriding the cases' order.
        target: `module:name` of the system to judge, imported by every rank; None for the cases'
            own targets.
        explainer: As for `judges.Chosen`.

    Returns:
        The exit status. A launched process does not return, but ends with the status, which is the
        same on every rank.

    Raises:
        UsageError: The target does not exist.
        EnvironmentProblem: This machine has no such backend, or too few devices.
    """
    if target is not None:
        # Report a wrong name once, not by every rank in every case.
        import_target(target)
    named = {"target": target or "", "explainer": explainer}
    if not is_launched():
        # Without a launcher, start own workers on this machine.
        setup = own_setup(backend, native=native)
        chosen = session.select(cases, setup.why_left_out)
        return session.run(chosen, lambda: on_workers(setup, **named))
    rank, ranks_max = place()
    setup = Setup(backend=backend, native=native, ranks_max=ranks_max)
    if rank:
        # Only rank 0 writes files.
        session.junit = None
    try:
        with _silent() if rank else contextlib.nullcontext():
            chosen = session.select(cases, setup.why_left_out)
            status = session.run(chosen, lambda: as_launched(setup, **named))
    except ZeroSimError as error:
        # All ranks raise the same error, so rank 0 alone prints it.
        if not rank:
            raise
        status = error.exit_status
    # Flush by hand, because the process ends without Python's own shutdown.
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads that torch leaves behind sometimes abort an ordinary exit.
    supervisor.end_process(status)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    # Rank 0 prints the same output.
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield
