"""A pool for batches: this process, others on this machine, or a Dask cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from zero_sim.backends.pool import OwnProcess, Pool, Processes, connected
from zero_sim.errors import UsageError
from zero_sim.fuzz.batch import Render, run_batch, warm_up
from zero_sim.fuzz.records import BatchReport, Job


@dataclass(frozen=True, slots=True)
class BatchPool:
    """Runs batches, some at a time."""

    pool: Pool
    render: Render
    """Writes the text of a finding, wherever it is found."""

    @property
    def slots(self) -> int:
        """How many batches it takes at a time."""
        return self.pool.slots

    def prepare(self, target: str, device: str) -> None:
        """Import what batches of a target need, and see that their device is there.

        Raises:
            UsageError: There is no such target.
            EnvironmentProblem: There is no such device.
        """
        self.pool.prepare(warm_up, target, device)

    def submit(self, job: Job) -> Future[BatchReport]:
        """Begin a batch; the future fails if its worker dies."""
        return self.pool.submit(run_batch, job, self.render)

    def interrupt(self) -> None:
        """Ask batches that are running to end after the case at hand."""
        self.pool.interrupt()


@contextlib.contextmanager
def open_batch_pool(
    *, render: Render, jobs: int | None = None, scheduler: str | None = None
) -> Iterator[BatchPool]:
    """Those who run the batches of a campaign.

    Args:
        render: What writes the text of a finding, wherever it is found.
        jobs: Batches at a time; 1, or all that a cluster has cores for, where left out.
        scheduler: Address of a Dask scheduler; absent for this machine.

    Raises:
        EnvironmentProblem: The cluster cannot be used.
    """
    if scheduler is not None:
        with connected(scheduler, slots=jobs) as cluster:
            yield BatchPool(cluster, render)
    elif jobs is None or jobs == 1:
        yield BatchPool(OwnProcess(), render)
    elif jobs < 1:
        raise UsageError(f"expected at least 1 job, got {jobs}")
    else:
        with contextlib.closing(Processes(jobs)) as processes:
            yield BatchPool(processes, render)
