"""Runs one batch of a campaign: draws cases, judges them, and shrinks what is new."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from hypothesis.strategies import SearchStrategy

from zero_sim.bundle import write_bundle
from zero_sim.drawing import draws
from zero_sim.errors import ZeroSimError
from zero_sim.fuzz.coverage import Grid, features_of
from zero_sim.fuzz.plans import layouts_of
from zero_sim.fuzz.records import BatchReport, Found, Job, size_in_words
from zero_sim.fuzz.strategies import scenarios
from zero_sim.launch import Stop, WorldPool, interrupts_ask, settle_memory
from zero_sim.report.text import render_case
from zero_sim.scenario.dump import to_toml
from zero_sim.scenario.spec import Scenario
from zero_sim.shrink import Key, Limits, key_of, may_shrink, shrink_finding
from zero_sim.targets import Target, import_target, refusals
from zero_sim.verify import run_case
from zero_sim.verify.records import CaseResult, Finding

Judge = Callable[[Scenario], CaseResult]


def run_batch(job: Job, *, cases_from: SearchStrategy[Scenario] | None = None) -> BatchReport:
    """Run a batch; what its cases are depends on its seed alone.

    An interrupt (SIGINT) ends it after the case at hand, with what was found so far; a second one
    at once.

    Args:
        job: Which batch.
        cases_from: What draws the cases; where left out, the strategy `scenarios` for the target.

    Raises:
        UsageError: There is no such target.
        EnvironmentProblem: This machine lacks something that the cases need.
    """
    deadline = None if job.seconds is None else time.monotonic() + job.seconds
    stop = Stop(deadline=deadline)
    target = import_target(job.target)
    settle_memory()
    with interrupts_ask(stop), WorldPool() as pool:
        drawn = scenarios(target) if cases_from is None else cases_from
        batch = _Batch(
            job=job,
            cases_from=drawn.map(lambda scenario: _aimed(scenario, job.target)),
            judge=lambda scenario: _judge(scenario, pool=pool, target=target),
            may_ask=lambda scenario: not refusals(target, scenario),
            stop=stop,
        )
        return batch.run()


@dataclass(slots=True)
class _Batch:
    """One batch while it runs."""

    job: Job
    cases_from: SearchStrategy[Scenario]
    judge: Judge
    may_ask: Callable[[Scenario], bool]
    """Whether the target is there for a case; drawn ones are."""
    stop: Stop
    cases: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    keys: Counter[Key] = field(default_factory=Counter)
    grid: Grid = field(default_factory=Grid)
    first: dict[Key, tuple[int, Scenario, CaseResult]] = field(default_factory=dict)
    """Where each finding was met first."""

    def run(self) -> BatchReport:
        started = time.monotonic()
        self._explore_all()
        complete = not self.stop.now
        seconds = time.monotonic() - started
        found = [
            self._shrunk(key, *met) for key, met in self.first.items() if key not in self.job.known
        ]
        return BatchReport(
            index=self.job.index,
            seed=self.job.seed,
            asked=self.job.cases,
            cases=self.cases,
            seconds=seconds,
            verdicts=dict(self.verdicts),
            layouts=dict(self.grid.counts),
            keys={"|".join(key): count for key, count in self.keys.items()},
            found=tuple(found),
            complete=complete,
        )

    def _explore_all(self) -> None:
        """Draw the batch's cases, always the same ones, and judge them."""
        for scenario in islice(draws(self.cases_from, seed=str(self.job.seed)), self.job.cases):
            if self.stop.now:
                return
            self._explore(scenario)

    def _explore(self, scenario: Scenario) -> None:
        result = self.judge(scenario)
        self.verdicts[result.verdict] += 1
        self.grid.add(features_of(layouts_of(scenario), redundancy=scenario.system.redundancy))
        key = key_of(result)
        if key is not None:
            self.keys[key] += 1
            self.first.setdefault(key, (self.cases, scenario, result))
        self.cases += 1

    def _shrunk(self, key: Key, case: int, scenario: Scenario, result: CaseResult) -> Found:
        """Shrink the case that met a finding first, and write what is left as a bundle."""
        if not may_shrink(key):
            return self._written(key, case, scenario, result)
        reduced, best = shrink_finding(
            scenario,
            result,
            judge=self.judge,
            may_ask=self.may_ask,
            limits=Limits(seconds=self.job.shrink_seconds),
            is_over=lambda: self.stop.asked,
        )
        return self._written(key, case, reduced.scenario, best)

    def _written(self, key: Key, case: int, scenario: Scenario, result: CaseResult) -> Found:
        bundle = ""
        if result.verdict == "fail":
            bundle = write_bundle(scenario, result, folder=Path(self.job.bundles)).name
        first = result.findings[0].message if result.findings else result.error
        return Found(
            key=key,
            message=first,
            seed=self.job.seed,
            case=case,
            scenario=to_toml(scenario),
            bundle=bundle,
            text=render_case(result),
            size=size_in_words(scenario),
        )


def _aimed(scenario: Scenario, target: str) -> Scenario:
    """The case with the target that it is for; one that is imported has no name to give it."""
    if ":" in target:
        return scenario
    return replace(scenario, system=replace(scenario.system, target=target))


def _judge(scenario: Scenario, *, pool: WorldPool, target: Target) -> CaseResult:
    """Judge a case; an error that nobody foresaw is a finding, too, and costs no other case."""
    try:
        return run_case(scenario, pool=pool, target=target)
    except ZeroSimError:
        raise
    except Exception as error:  # noqa: BLE001
        finding = Finding(
            check="internal.error",
            phase=type(error).__name__,
            message="zero_sim raised an error that it did not foresee; please report it",
            detail=traceback.format_exc(),
        )
        what = f"{type(error).__name__}: {error}"
        return CaseResult(
            id=scenario.name, verdict="error", seconds=0.0, error=what, findings=(finding,)
        )
