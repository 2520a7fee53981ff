"""Who runs batches: this process, others on this machine, or a Dask cluster.

Whatever happens to one worker costs the batch that it was running and no other.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from concurrent.futures import CancelledError, Executor, Future, wait
from typing import Any, Protocol

from zero_sim.backends.hands import Hand
from zero_sim.errors import EnvironmentProblem, UsageError
from zero_sim.fuzz.batch import Render, run_batch, warm_up
from zero_sim.fuzz.records import BatchReport, Job

CONNECT_SECONDS = 30


class Crew(Protocol):
    """Runs batches, some at a time."""

    slots: int
    """How many batches it takes at a time."""

    def prepare(self, target: str) -> None:
        """Import what batches of a target need.

        Raises:
            UsageError: There is no such target.
        """
        ...

    def submit(self, job: Job) -> Future[BatchReport]:
        """Begin a batch; the future fails if its worker dies."""
        ...

    def interrupt(self) -> None:
        """Ask batches that are running to end after the case at hand."""
        ...


class OwnCrew:
    """Runs a batch at a time in this process, before `submit` comes back."""

    slots = 1

    def __init__(self, render: Render) -> None:
        self._render = render

    def prepare(self, target: str) -> None:
        """Import it here."""
        warm_up(target)

    def submit(self, job: Job) -> Future[BatchReport]:
        """Run a batch."""
        future: Future[BatchReport] = Future()
        future.set_result(run_batch(job, self._render))
        return future

    def interrupt(self) -> None:
        """Nothing runs when this can be called."""


class ProcessCrew:
    """Runs batches in processes of their own on this machine; to be closed.

    Args:
        slots: Number of processes.
        render: What writes the text of a finding.
    """

    def __init__(self, slots: int, *, render: Render) -> None:
        self.slots = slots
        self._render = render
        self._hands = [Hand[Any]() for _ in range(slots)]

    def prepare(self, target: str) -> None:
        """Import it here, which says what is wrong with it, and in every process."""
        warm_up(target)
        # A process that dies is replaced when it is given a batch.
        wait([hand.submit(warm_up, target) for hand in self._hands])

    def submit(self, job: Job) -> Future[BatchReport]:
        """Begin a batch on a process that is free."""
        hand = next(hand for hand in self._hands if hand.is_free)
        return hand.submit(run_batch, job, self._render)

    def interrupt(self) -> None:
        """Send every process at work an interrupt."""
        for hand in self._hands:
            hand.interrupt()

    def close(self) -> None:
        """End the processes, which are idle now or to be given up."""
        for hand in self._hands:
            hand.close()


class ClusterCrew:
    """Runs batches on the workers of a Dask cluster; a batch of a worker that dies is not retried.

    Args:
        executor: The cluster, as an executor.
        slots: Number of batches at a time.
        render: What writes the text of a finding.
    """

    def __init__(self, executor: Executor, *, slots: int, render: Render) -> None:
        self._executor = executor
        self._render = render
        self.slots = slots
        self._running: list[Future[BatchReport]] = []

    def prepare(self, target: str) -> None:
        """Nothing: each worker imports what its first batch needs."""

    def submit(self, job: Job) -> Future[BatchReport]:
        """Begin a batch on some worker."""
        future = self._executor.submit(run_batch, job, self._render)
        self._running = [other for other in self._running if not other.done()] + [future]
        return future

    def interrupt(self) -> None:
        """Give up what runs: a cluster has no interrupts."""
        for future in self._running:
            future.cancel()


@contextlib.contextmanager
def open_crew(
    *, render: Render, jobs: int | None = None, scheduler: str | None = None
) -> Iterator[Crew]:
    """Those who run the batches of a campaign.

    Args:
        render: What writes the text of a finding, wherever it is found.
        jobs: Batches at a time; 1, or all that a cluster has cores for, where left out.
        scheduler: Address of a Dask scheduler; absent for this machine.

    Raises:
        EnvironmentProblem: The cluster cannot be used.
    """
    if scheduler is not None:
        with _connected(scheduler, jobs=jobs, render=render) as crew:
            yield crew
        return
    if jobs is None or jobs == 1:
        yield OwnCrew(render)
        return
    if jobs < 1:
        raise UsageError(f"expected at least 1 job, got {jobs}")
    crew = ProcessCrew(jobs, render=render)
    try:
        yield crew
    finally:
        crew.close()


@contextlib.contextmanager
def _connected(scheduler: str, *, jobs: int | None, render: Render) -> Iterator[ClusterCrew]:
    try:
        connect = importlib.import_module("distributed").Client
    except ModuleNotFoundError:
        raise EnvironmentProblem(
            "expected the package 'distributed' for --scheduler, which is not installed. "
            "Try `pip install zero-sim[cluster]`, or --jobs."
        ) from None
    try:
        client = connect(scheduler, timeout=CONNECT_SECONDS)
    except (OSError, ValueError) as error:
        raise EnvironmentProblem(
            f"expected a Dask scheduler at {scheduler!r}, got {error}. Try `dask scheduler`, which "
            "says its address."
        ) from None
    with client:
        cores = sum(client.ncores().values())
        if not cores:
            raise EnvironmentProblem(
                f"expected workers at {scheduler!r}, got none. Try `dask worker {scheduler}`."
            )
        # Two batches in one process would stand in the way of each other's ranks.
        executor = client.get_executor(pure=False, retries=0)
        yield ClusterCrew(executor, slots=jobs or len(client.ncores()), render=render)


def is_lost(error: BaseException) -> bool:
    """Whether an error of a batch says that its worker is gone, not what the batch did."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, CancelledError) or bool(names & {"BrokenExecutor", "KilledWorker"})
