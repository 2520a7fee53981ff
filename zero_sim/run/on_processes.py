"""`zero-sim run` on real processes: own workers, or those that a launcher started."""

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
    """What tells the results of cases."""

    junit: Path | None
    """Where JUnit XML goes, if anywhere; of several processes one writes it."""

    def select(self, cases: Sequence[Case], why_left_out: Callable[[Scenario], str]) -> list[Case]:
        """The cases that a backend can judge."""
        ...

    def run(
        self,
        cases: Sequence[Case],
        judging: Callable[[], AbstractContextManager[Callable[[Scenario], CaseResult]]],
    ) -> int:
        """Judge them and tell all; the exit status."""
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
    """Run cases where every rank is a process.

    Args:
        session: What tells the results.
        cases: All that are selected; those that the backend cannot judge are left out.
        backend: What carries the collectives.
        native: Whether the backend adds in its own order, whatever the cases say.
        target: `module:name` of the system to judge, which every rank imports; None for those that
            the cases name.
        explainer: As for `judges.Chosen`.

    Returns:
        The exit status. A process that a launcher started does not come back: it ends with it, the
        same on every rank.

    Raises:
        UsageError: There is no such target.
        EnvironmentProblem: This machine has no such backend, or too few devices.
    """
    if target is not None:
        # Said once, and not by every rank in every case.
        import_target(target)
    named = {"target": target or "", "explainer": explainer}
    if not is_launched():
        setup = own_setup(backend, native=native)
        chosen = session.select(cases, setup.why_left_out)
        return session.run(chosen, lambda: on_workers(setup, **named))
    rank, ranks_max = place()
    setup = Setup(backend=backend, native=native, ranks_max=ranks_max)
    if rank:
        session.junit = None
    try:
        with _silent() if rank else contextlib.nullcontext():
            chosen = session.select(cases, setup.why_left_out)
            status = session.run(chosen, lambda: as_launched(setup, **named))
    except ZeroSimError as error:
        # What keeps all of them from it, rank 0 says.
        if not rank:
            raise
        status = error.exit_status
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads that torch leaves behind abort a process now and then that ends in the ordinary way.
    supervisor.end_process(status)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Print nothing: rank 0 says it all."""
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield
