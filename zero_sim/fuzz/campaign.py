"""A campaign: batch after batch of drawn cases against one target, past every finding."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from pathlib import Path

from zero_sim.backends.pool import is_lost
from zero_sim.errors import EnvironmentProblem, UsageError, ZeroSimError
from zero_sim.fuzz.batch_pool import BatchPool
from zero_sim.fuzz.corpus import SHARDS_MAX, Corpus, Head, counted, open_corpus
from zero_sim.fuzz.coverage import Coverage
from zero_sim.fuzz.recheck import Rechecked, recheck
from zero_sim.fuzz.records import BATCH_CASES, BatchReport, Found, Job, batch_seed
from zero_sim.host.files import unwritten

_FAMILIES = 8
"""Of the most members that there is room for in a batch: its last one may be cut short."""
INTERRUPT_SECONDS = 30
"""How long batches have to end after an interrupt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a campaign is to do.

    Raises:
        UsageError: A number is out of range.
    """

    target: str = "zero_sim"
    device: str = "cpu"
    """Where ranks and reference compute."""
    options: tuple[tuple[str, str], ...] = ()
    """Options of the target's own that all cases have, by name."""
    family: int = 1
    """Most members of a family; 1 for cases that have none."""
    seed: int = 0
    cases: int | None = None
    """Cases of all shards together; absent for no limit."""
    seconds: float | None = None
    """After so long no further case is begun; absent for no limit."""
    shard: tuple[int, int] = (1, 1)
    """Which shard of how many, counted from 1."""
    corpus: Path
    """Folder of what is kept, bundles of findings included."""

    def __post_init__(self) -> None:
        number, count = self.shard
        if not 1 <= number <= count <= SHARDS_MAX:
            raise UsageError(
                f"expected a shard of 1/N to N/N, with N of at most {SHARDS_MAX:,}, "
                f"got {number}/{count}."
            )
        if self.family < 1:
            raise UsageError(f"expected a family of at least 1, got {self.family}")
        if self.cases is not None and self.cases < 0:
            raise UsageError(f"expected a number of cases, got {self.cases}")

    @property
    def batch_cases(self) -> int:
        """Number of cases of each batch but the last one."""
        return BATCH_CASES if self.family == 1 else max(BATCH_CASES, _FAMILIES * self.family)

    @property
    def bundles(self) -> Path:
        """Where findings go."""
        return self.corpus / "bundles"

    def batches(self) -> Iterator[tuple[int, int]]:
        """This shard's batches: place in the campaign and number of cases, in order."""
        number, count = self.shard
        index = number - 1
        while cases := self.cases_of(index):
            yield index, cases
            index += count

    def cases_of(self, index: int) -> int:
        """Number of cases of a batch, 0 behind the last one."""
        if self.cases is None:
            return self.batch_cases
        return max(0, min(self.batch_cases, self.cases - index * self.batch_cases))


@dataclass(kw_only=True, slots=True)
class CampaignTotals:
    """What has come of a campaign so far, earlier runs of it included."""

    cases: int = 0
    earlier_cases: int = 0
    """Those of them that an earlier run did."""
    batches: int = 0
    busy_seconds: float = 0.0
    """Over all workers; without shrinking."""
    verdicts: Counter[str] = field(default_factory=Counter)
    params_only: int = 0
    """Cases that pass with neither an averaged gradient nor optimizer state."""
    keys: Counter[str] = field(default_factory=Counter)
    """Failing cases by finding."""
    unproved: Counter[str] = field(default_factory=Counter)
    """Inconclusive cases by the check that says why."""
    unobserved: Counter[str] = field(default_factory=Counter)
    """By what the target does not tell, cases of which nothing is said of that."""
    taken: set[str] = field(default_factory=set)
    """Rules that were worked out because the target declares none."""
    found: list[Found] = field(default_factory=list)
    """Distinct findings, in the order in which they came."""
    coverage: Coverage = field(default_factory=Coverage)
    lost: list[BatchReport] = field(default_factory=list)
    """Batches whose worker died."""
    rechecked: list[Rechecked] = field(default_factory=list)
    """What came of the findings of earlier runs."""
    interrupted: bool = False
    unkept: ZeroSimError | None = None
    """Why no more was kept, and so no more was run."""
    futile: str = ""
    """Why no more was run, if further cases would show nothing."""

    @property
    def is_empty(self) -> bool:
        """Whether this run ran no case."""
        return self.cases == self.earlier_cases and not self.lost

    def take(self, report: BatchReport) -> None:
        """Add what came of a batch."""
        self.note(report.found)
        if report.lost:
            self.lost.append(report)
        self.batches += 1
        self.cases += report.cases
        self.busy_seconds += report.seconds
        self.verdicts.update(report.verdicts)
        self.params_only += report.params_only
        self.keys.update(report.keys)
        self.unproved.update(report.unproved)
        self.unobserved.update(report.unobserved)
        self.taken.update(report.taken)
        self.coverage.take(report.cases_with, cases=report.cases)
        # Another batch may show something where this one did not.
        is_futile = set(self.verdicts) <= {"error"}
        self.futile = (report.futile or self.futile) if is_futile else ""

    def note(self, found: Iterable[Found]) -> None:
        """Add findings; two with one smallest case are one.

        One that nobody made smaller gives way to one that somebody did.
        """
        for one in found:
            alike = [known for known in self.found if known.key[:-1] == one.key[:-1]]
            if one.as_met and alike:
                continue
            self.found = [known for known in self.found if not (known.as_met and known in alike)]
            places = [i for i, known in enumerate(self.found) if known.is_of == one.is_of]
            if places:
                self.found[places[0]] = self.found[places[0]].joined(one)
            else:
                self.found.append(one)

    def progress(self, *, seconds: float) -> str:
        """One line: how fast, what was found, what was covered.

        Args:
            seconds: Since this run began.
        """
        rate = (self.cases - self.earlier_cases) / seconds if seconds > 0 else 0.0
        outlook = self.coverage.outlook
        new = "" if outlook is None else f", new ones in {outlook.new_share:.0%} of cases"
        return (
            f"{self.cases} cases, {rate:.1f} a second, {len(self.found)} distinct "
            f"finding{'' if len(self.found) == 1 else 's'}, "
            f"{len(self.coverage.features)} features, {len(self.coverage.pairs)} pairs{new}"
        )

    def as_dict(self) -> dict[str, object]:
        """Everything, ready for JSON."""
        return {
            "cases": self.cases,
            "earlier_cases": self.earlier_cases,
            "batches": self.batches,
            "busy_seconds": self.busy_seconds,
            "verdicts": dict(self.verdicts),
            "params_only": self.params_only,
            "failing_cases": dict(self.keys),
            "inconclusive_cases": dict(self.unproved),
            "unobserved": dict(self.unobserved),
            "taken": sorted(self.taken),
            "findings": [
                {
                    "check": found.key.check,
                    "phase": found.key.phase,
                    "kind": found.key.kind,
                    "manner": found.key.manner,
                    "place": found.key.place,
                    "message": found.message,
                    "bundle": found.bundle,
                    "seed": found.seed,
                    "case": found.case,
                    "size": found.size,
                    "scenario": found.scenario,
                }
                for found in self.found
            ],
            "coverage": self.coverage.as_dict(),
            "lost": [{"index": one.index, "seed": one.seed, "why": one.lost} for one in self.lost],
            "rechecked": [one.as_dict() for one in self.rechecked],
            "interrupted": self.interrupted,
            "unkept": None if self.unkept is None else str(self.unkept),
            "futile": self.futile,
        }


def run_campaign(
    plan: Plan,
    *,
    batch_pool: BatchPool,
    tell: Callable[[CampaignTotals], None] = lambda totals: None,
    send: Callable[[], None] = lambda: None,
) -> CampaignTotals:
    """Run a campaign, or go on with one that its corpus holds.

    It goes on past findings; those of earlier runs are judged again first, and are gone where they
    are fixed. An interrupt ends it cleanly: batches at work end after their case, and all that they
    found is kept.

    Args:
        plan: What to do.
        batch_pool: Who does it.
        tell: Called after each batch with what there is so far.
        send: Called after each batch that was kept, and at the end, to send the corpus elsewhere;
            where it raises an EnvironmentProblem no more is run.

    Raises:
        UsageError: There is no such target, the corpus is of another campaign, or cannot be read or
            written there.
        EnvironmentProblem: There is no room for the corpus.
    """
    head = Head(
        seed=plan.seed,
        target=plan.target,
        cases=plan.batch_cases,
        shard=plan.shard,
        device=plan.device,
        options=tuple(sorted(plan.options)),
        family=plan.family,
    )
    with open_corpus(plan.corpus, head=head) as corpus:
        run = _Run(plan=plan, batch_pool=batch_pool, tell=tell, send=send, corpus=corpus)
        run.run()
    return run.totals


@dataclass(kw_only=True, slots=True)
class _Run:
    """A campaign while it runs."""

    plan: Plan
    batch_pool: BatchPool
    tell: Callable[[CampaignTotals], None]
    send: Callable[[], None]
    corpus: Corpus
    totals: CampaignTotals = field(default_factory=CampaignTotals)
    ran: dict[int, int] = field(default_factory=dict)
    """By batch how many of its cases an earlier run did, from the first one on."""
    pending: dict[Future[BatchReport], Job] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    def recheck(self) -> None:
        """Judge again what earlier runs found, and let go of what is fixed."""
        earlier = CampaignTotals()
        for report in self.corpus.reports:
            earlier.note(report.found)
        for one in recheck(earlier.found, target=self.plan.target, device=self.plan.device):
            self.totals.rechecked.append(one)
            if one.outcome == "fixed":
                try:
                    self.corpus.append_fixed(one.found)
                except OSError as error:
                    raise unwritten("a corpus", self.corpus.folder, error) from None

    def remember(self) -> None:
        """Take in what earlier runs did; a batch that was cut short goes on where it ended."""
        for report, counts in counted(self.corpus.reports):
            if counts and self.plan.cases_of(report.index):
                self.ran[report.index] = report.start + report.cases
                self.totals.take(replace(report, lost=""))
            else:
                self.totals.note(report.found)
        self.totals.earlier_cases = self.totals.cases
        # It may be mended since.
        self.totals.futile = ""

    def run(self) -> None:
        try:
            self.batch_pool.prepare(self.plan.target, self.plan.device)
            self.recheck()
        except KeyboardInterrupt:
            self.totals.interrupted = True
        self.remember()
        try:
            # What is imported and judged again does not count.
            self.started = time.monotonic()
            self._all_batches()
        except KeyboardInterrupt:
            self.totals.interrupted = True
        if self.totals.interrupted:
            self._wind_up()
        self._send()

    def _all_batches(self) -> None:
        batches = self.plan.batches()
        while True:
            while len(self.pending) < self.batch_pool.slots and not self._is_over():
                job = self._next_job(batches)
                if job is None:
                    break
                self.pending[self.batch_pool.submit(job)] = job
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
            seed, start = batch_seed(self.plan.seed, index), self.ran.get(index, 0)
            left = tuple(one for one in self.totals.found if one.as_met and one.seed == seed)
            if start >= cases and not left:
                continue
            return Job(
                index=index,
                seed=seed,
                cases=cases,
                start=start,
                unshrunk=left,
                target=self.plan.target,
                device=self.plan.device,
                options=self.plan.options,
                family=self.plan.family,
                bundles=str(self.plan.bundles),
                known=tuple(found for found in self.totals.found if not found.as_met),
                seconds=self._seconds_left(),
                unfinished=str(self.corpus.unfinished(index)),
            )
        return None

    def _take(self, future: Future[BatchReport]) -> None:
        job = self.pending.pop(future)
        report = _report(future, job)
        left = self.corpus.read_unfinished(job.index) if report.lost else None
        if left is not None:
            report = replace(left, lost=report.lost)
        try:
            self.corpus.append(report)
        except OSError as error:
            self.totals.unkept = unwritten("a corpus", self.corpus.folder, error)
        self.totals.take(report)
        self._send()
        out_of_time = job.seconds is not None and (self._seconds_left() or 0.0) <= 0
        if not report.complete and not report.lost and not out_of_time:
            self.totals.interrupted = True
        self.tell(self.totals)

    def _send(self) -> None:
        if self.totals.unkept is None:
            try:
                self.send()
            except EnvironmentProblem as error:
                self.totals.unkept = error

    def _wind_up(self) -> None:
        """Wait a little for what still runs, and keep what comes of it."""
        self.batch_pool.interrupt()
        # A second interrupt ends the waiting.
        with contextlib.suppress(KeyboardInterrupt):
            wait(self.pending, timeout=INTERRUPT_SECONDS)
        for future, job in list(self.pending.items()):
            if future.done():
                self._take(future)
            else:
                future.cancel()
                self._keep_unfinished(job)

    def _keep_unfinished(self, job: Job) -> None:
        left = self.corpus.read_unfinished(job.index)
        if left is not None:
            self.totals.note(left.found)


def _report(future: Future[BatchReport], job: Job) -> BatchReport:
    """What came of a batch, or that its worker died with it."""
    error = None if future.cancelled() else future.exception()
    if error is None and not future.cancelled():
        return future.result()
    if error is not None and not is_lost(error):
        raise error
    return BatchReport(
        index=job.index,
        seed=job.seed,
        asked=job.cases,
        start=job.start,
        cases=0,
        seconds=0.0,
        complete=False,
        lost=f"{type(error).__name__}: {error}" if error is not None else "given up",
    )
