"""A campaign: batches of drawn cases against a target. It continues after findings."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from pathlib import Path

from zero_sim.backends.pool import OwnProcess, Pool, Processes, connected, is_lost
from zero_sim.errors import EnvironmentProblem, UsageError
from zero_sim.fuzz.batch import Render, run_batch, warm_up
from zero_sim.fuzz.corpus import Corpus, open_corpus
from zero_sim.fuzz.known import recheck
from zero_sim.fuzz.records import (
    BatchReport,
    Counts,
    Head,
    Job,
    batch_seed,
)
from zero_sim.fuzz.totals import CampaignTotals

INTERRUPT_SECONDS = 30
"""Time for batches to end after an interrupt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Settings of a campaign.

    Raises:
        UsageError: A number is out of range.
    """

    head: Head
    cases: int | None = None
    """Total number of cases on all shards; None for no limit."""
    seconds: float | None = None
    """Time limit for starting cases; None for no limit."""
    corpus: Path
    """Folder for results, including bundles of findings."""

    def __post_init__(self) -> None:
        if self.cases is not None and self.cases < 0:
            raise UsageError(f"expected a number of cases >= 0, got {self.cases}")

    @property
    def bundles(self) -> Path:
        """Folder for bundles of findings."""
        return self.corpus / "bundles"

    def batches(self) -> Iterator[tuple[int, int]]:
        """Yield this shard's batches in order: index in the campaign, number of cases."""
        # Shards take batches in turn, because the number of batches may be unknown.
        number, count = self.head.shard
        index = number - 1
        while cases := self.cases_of(index):
            yield index, cases
            index += count

    def cases_of(self, index: int) -> int:
        """Return the number of cases in a batch; 0 after the last batch."""
        if self.cases is None:
            return self.head.cases
        return max(0, min(self.head.cases, self.cases - index * self.head.cases))


@contextlib.contextmanager
def open_pool(*, jobs: int | None = None, scheduler: str | None = None) -> Iterator[Pool]:
    """Open a pool that runs batches.

    Args:
        jobs: Batches in parallel; None for 1, or for all cores of a cluster.
        scheduler: Address of a Dask scheduler; None for this machine.

    Raises:
        EnvironmentProblem: The cluster cannot be used.
    """
    if scheduler is not None:
        with connected(scheduler, slots=jobs) as cluster:
            yield cluster
    elif jobs is None or jobs == 1:
        yield OwnProcess()
    elif jobs < 1:
        raise UsageError(f"expected at least 1 job, got {jobs}")
    else:
        with contextlib.closing(Processes(jobs)) as processes:
            yield processes


def run_campaign(
    plan: Plan,
    *,
    pool: Pool,
    render: Render,
    on_batch: Callable[[CampaignTotals], None] = lambda totals: None,
    on_converted: Callable[[Path], None] = lambda path: None,
) -> CampaignTotals:
    """Run a campaign, or resume it from its corpus.

    The campaign continues after findings. Earlier findings are judged again first, and removed if
    they are fixed. After an interrupt, running batches end after their current case, and their
    findings are saved.

    Args:
        plan: Settings of the campaign.
        pool: Runs the batches.
        render: Renders a finding as text, on any worker.
        on_batch: Receives the totals so far after each batch.
        on_converted: Receives the file of an earlier version if it was converted.

    Raises:
        UsageError: The target does not exist, the corpus belongs to another campaign, or it cannot
            be read or written.
        EnvironmentProblem: The disk is full.
    """
    with open_corpus(plan.corpus, head=plan.head) as corpus:
        if corpus.converted is not None:
            on_converted(corpus.converted)
        run = _Run(plan=plan, pool=pool, render=render, on_batch=on_batch, corpus=corpus)
        run.run()
    return run.totals


@dataclass(kw_only=True, slots=True)
class _Run:
    plan: Plan
    pool: Pool
    render: Render
    on_batch: Callable[[CampaignTotals], None]
    corpus: Corpus
    totals: CampaignTotals = field(default_factory=CampaignTotals)
    ran: dict[int, int] = field(default_factory=dict)
    """Number of cases that earlier runs judged, by batch."""
    pending: dict[Future[BatchReport], Job] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    def recheck(self) -> None:
        """Judge earlier findings again, and remove fixed findings."""
        # Totals merge findings with the same smallest case, so that each case is judged once.
        earlier = CampaignTotals()
        earlier.note(self.corpus.kept.found.values())
        for one in recheck(
            earlier.found, target=self.plan.head.target, device=self.plan.head.device
        ):
            self.totals.rechecked.append(one)
            if one.outcome == "fixed":
                self.corpus.append_fixed(one.found)

    def remember(self) -> None:
        """Load earlier results. Incomplete batches resume at their next case."""
        for report, counts in self.corpus.kept.counted():
            # If the plan has fewer cases than an earlier run, the last batches do not count.
            if counts and self.plan.cases_of(report.index):
                self.ran[report.index] = report.start + report.counts.cases
                # A worker's death in an earlier run does not concern this run.
                self.totals.take(replace(report, lost=""))
        self.totals.note(self.corpus.kept.found.values())
        self.totals.earlier_cases = self.totals.counts.cases
        # The reason may have been fixed.
        self.totals.futile = ""

    def run(self) -> None:
        try:
            self.pool.prepare(warm_up, self.plan.head.target, self.plan.head.device)
            self.recheck()
        except KeyboardInterrupt:
            self.totals.interrupted = True
        # After the recheck, because it removes reports of batches that met a fixed finding.
        self.remember()
        try:
            # The time of imports and the recheck does not count.
            self.started = time.monotonic()
            self._all_batches()
        except KeyboardInterrupt:
            self.totals.interrupted = True
        if self.totals.interrupted:
            self._wind_up()

    def _all_batches(self) -> None:
        # At most a batch per slot is submitted: a long queue would delay an interrupt, and its jobs
        # would not know findings that are made meanwhile.
        batches = self.plan.batches()
        while True:
            while len(self.pending) < self.pool.slots and not self._is_over():
                job = self._next_job(batches)
                if job is None:
                    break
                self.pending[self.pool.submit(run_batch, job, self.render)] = job
            if not self.pending:
                return
            finished, _ = wait(self.pending, return_when=FIRST_COMPLETED)
            for future in finished:
                self._take(future)

    def _is_over(self) -> bool:
        left = self._seconds_left()
        totals = self.totals
        is_stopped = totals.interrupted or totals.unkept is not None or bool(totals.futile)
        return is_stopped or (left is not None and left <= 0)

    def _seconds_left(self) -> float | None:
        if self.plan.seconds is None:
            return None
        return self.plan.seconds - (time.monotonic() - self.started)

    def _next_job(self, batches: Iterator[tuple[int, int]]) -> Job | None:
        for index, cases in batches:
            seed, start = batch_seed(self.plan.head.seed, index), self.ran.get(index, 0)
            # If a complete batch has unshrunk findings, it runs again without cases.
            left = tuple(one for one in self.totals.found if one.as_met and one.seed == seed)
            if start >= cases and not left:
                continue
            return Job(
                index=index,
                seed=seed,
                cases=cases,
                start=start,
                unshrunk=left,
                target=self.plan.head.target,
                device=self.plan.head.device,
                options=self.plan.head.options,
                family=self.plan.head.family,
                order=self.plan.head.order,
                bundles=str(self.plan.bundles),
                # Unshrunk findings have no needs yet, so they would explain every case with their
                # key.
                known=tuple(found for found in self.totals.found if not found.as_met),
                seconds=self._seconds_left(),
                unfinished=str(self.corpus.unfinished(index)),
            )
        return None

    def _take(self, future: Future[BatchReport]) -> None:
        job = self.pending.pop(future)
        report = _report(future, job)
        # If the worker died, the batch's file contains its findings up to then.
        left = self.corpus.read_unfinished(job.index) if report.lost else None
        if left is not None:
            report = replace(left, lost=report.lost)
        try:
            self.corpus.append(report)
        # Show the findings, but run nothing more, because further results could not be saved
        # either.
        except (EnvironmentProblem, UsageError) as error:
            self.totals.unkept = error
        self.totals.take(report)
        # If a batch ended early although there was time, it was interrupted.
        out_of_time = job.seconds is not None and (self._seconds_left() or 0.0) <= 0
        if not report.complete and not report.lost and not out_of_time:
            self.totals.interrupted = True
        self.on_batch(self.totals)

    def _wind_up(self) -> None:
        """Wait for running batches, up to a limit, and save their results."""
        self.pool.interrupt()
        # A second interrupt ends the wait.
        with contextlib.suppress(KeyboardInterrupt):
            wait(self.pending, timeout=INTERRUPT_SECONDS)
        # A copy, because `_take` removes entries.
        for future, job in list(self.pending.items()):
            if future.done():
                self._take(future)
            else:
                future.cancel()
                # Show these findings. The file stays, and the next start saves them.
                left = self.corpus.read_unfinished(job.index)
                self.totals.note(() if left is None else left.found)


def _report(future: Future[BatchReport], job: Job) -> BatchReport:
    """Return a batch's report. If its worker died, the report contains only this."""
    # `exception` would raise for a cancelled future.
    error = None if future.cancelled() else future.exception()
    if error is None and not future.cancelled():
        return future.result()
    # Other errors are bugs in zero_sim or usage errors.
    if error is not None and not is_lost(error):
        raise error
    return BatchReport(
        index=job.index,
        seed=job.seed,
        counts=Counts(),
        start=job.start,
        complete=False,
        lost=f"{type(error).__name__}: {error}" if error is not None else "given up",
    )
