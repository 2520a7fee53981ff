"""A batch of a campaign: draw cases, judge them, and shrink new findings."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from zero_sim.backends.stop import Stop, interrupts_ask
from zero_sim.backends.worlds import WorldPool
from zero_sim.bundle import Ran, write_bundle
from zero_sim.errors import ScenarioError, ZeroSimError
from zero_sim.findings.records import CaseResult, taken_notes, unforeseen
from zero_sim.fuzz.choices import Drawable
from zero_sim.fuzz.coverage import note_features
from zero_sim.fuzz.drawing import draws
from zero_sim.fuzz.excluded import why_none_fits
from zero_sim.fuzz.families import has_family, siblings
from zero_sim.fuzz.features import features_of
from zero_sim.fuzz.known import KnownFindings
from zero_sim.fuzz.records import (
    BATCH_CASES,
    BatchReport,
    Counts,
    Found,
    Job,
    to_json,
)
from zero_sim.fuzz.strategies import drawn_cases
from zero_sim.host.device import check_device
from zero_sim.host.files import write_whole
from zero_sim.host.garbage import settle_memory
from zero_sim.judge.trajectory import Trajectories
from zero_sim.rules.judging import run_case
from zero_sim.run.sgd_twin import TWIN_EVERY, marked, with_twin
from zero_sim.scenario.dump import to_toml
from zero_sim.scenario.spec import Scenario, SystemSpec
from zero_sim.shrink import (
    Key,
    Limits,
    how_far_apart,
    key_of,
    may_shrink,
    places_of,
    right_judge,
    shrink_finding,
)
from zero_sim.shrink.same import in_words
from zero_sim.targets import Target, import_target, refusals, with_options
from zero_sim.targets.options import check_given

Render = Callable[[CaseResult], str]
"""Renders a result as text. A module-level function, because it is pickled for workers."""


def run_batch(
    job: Job,
    render: Render,
    *,
    cases_from: Drawable[Scenario] | None = None,
) -> BatchReport:
    """Run a batch. Its cases depend only on its seed, apart from the simplest case in batch 0.

    An interrupt ends the batch after the current case. A second interrupt ends it at once, and
    findings not shrunk yet are returned unshrunk.

    Args:
        job: The batch.
        render: Renders a finding as text.
        cases_from: Source of cases; None for `drawn_cases`.

    Raises:
        UsageError: The target does not exist.
        EnvironmentProblem: This machine cannot run the cases.
    """
    target = import_target(job.target)
    settle_memory()
    # Start the clock after the imports.
    deadline = None if job.seconds is None else time.monotonic() + job.seconds
    stop = Stop(deadline=deadline)
    with interrupts_ask(stop), WorldPool() as pool:
        system = _System(
            target=target,
            pool=pool,
            device=job.device,
            # Only families share reference steps, so none are kept for single cases.
            trajectories=Trajectories() if job.family > 1 else None,
        )
        drawn = drawn_cases(target, order=job.order) if cases_from is None else cases_from
        if options := dict(job.options):
            check_given(target, options)
            # Redraw cases that the target refuses with these options: a refusal is no finding.
            drawn = drawn.map(lambda scenario: with_options(scenario, options)).filter(
                system.may_run
            )
        # Set the target, because bundles and keys contain its name.
        drawn = drawn.map(lambda scenario: _aimed(scenario, job.target))
        findings = _Findings(job=job, system=system, render=render, stop=stop)
        batch = _Batch(job=job, system=system, cases_from=drawn, findings=findings, stop=stop)
        return batch.run()


@dataclass(frozen=True, kw_only=True, slots=True)
class _System:
    target: Target
    pool: WorldPool
    device: str
    trajectories: Trajectories | None
    """Reference steps that family members share; None without families."""

    def may_run(self, scenario: Scenario) -> bool:
        """Return True if the target supports a case."""
        return not refusals(self.target, scenario)

    def judge(self, scenario: Scenario) -> CaseResult:
        """Judge a case. An unexpected exception becomes a finding."""
        try:
            return run_case(
                scenario,
                pool=self.pool,
                target=self.target,
                device=self.device,
                trajectories=self.trajectories,
                # Log digests take a few percent of a small case's time, and only replays need them.
                with_digest=False,
            )
        # Errors of the user or this machine are no findings.
        except ZeroSimError:
            raise
        # Do not raise, so that the other cases still run.
        except Exception as error:  # noqa: BLE001
            return unforeseen(error, id=scenario.name)


class _Failed(NamedTuple):
    case: int
    scenario: Scenario
    key: Key
    apart: float
    """Largest difference between values; see `how_far_apart`."""


@dataclass(kw_only=True, slots=True)
class _Findings:
    job: Job
    system: _System
    render: Render
    stop: Stop
    failed: list[_Failed] = field(default_factory=list)
    met: dict[Key, Found] = field(default_factory=dict)
    """First case by key, not shrunk."""
    looked_at: int = 0
    """Number of failed cases handled by `shrink_all`: shrunk, or recognised as known."""
    known: KnownFindings = field(default_factory=KnownFindings)
    shrunk: dict[tuple[object, ...], Found] = field(default_factory=dict)
    """New findings after shrinking."""

    def __post_init__(self) -> None:
        # Do not shrink findings of other batches again.
        for each in self.job.known:
            self.known.add(each)

    def take_up(self) -> None:
        """Continue with findings that an earlier run of this batch did not shrink."""
        for one in self.job.unshrunk:
            try:
                scenario = one.case_again()
            except ScenarioError:
                continue  # Another version wrote this case, so it cannot be shrunk here.
            self.failed.append(_Failed(one.case, scenario, one.key, one.apart))
            self.met[one.key] = one

    def note(self, failed: _Failed, result: CaseResult) -> bool:
        """Record a failed case; return True if it is the first with its key."""
        self.failed.append(failed)
        is_first = failed.key not in self.met
        # Record the unshrunk case, because a second interrupt may come before it is shrunk.
        if is_first:
            self.met[failed.key] = replace(self._describe(failed, result), as_met=True)
        return is_first

    def so_far(self) -> tuple[Found, ...]:
        """Return the new findings, shrunk if the time sufficed."""
        new: dict[Key, Found] = {}
        # `shrink_all` sorts the list and counts handled cases, so the rest is not shrunk yet.
        for _, scenario, key, _ in self.failed[self.looked_at :]:
            if key not in new and not self.known.explain(key, scenario):
                new[key] = self.met[key]
        return (*self.shrunk.values(), *new.values())

    def shrink_all(self, keep: Callable[[], None]) -> None:
        """Shrink a case of each new finding.

        Args:
            keep: Called after each case.
        """
        # Within a check, the largest difference first, because smaller differences may be its
        # rounded consequences. Reversed, so that each check gets the position of its first case.
        checks = {one.key.check: place for place, one in reversed([*enumerate(self.failed)])}
        self.failed.sort(key=lambda one: (checks[one.key.check], -one.apart))
        for failed in self.failed:
            if not self.known.explain(failed.key, failed.scenario):
                one = self._shrink(failed)
                self.known.add(one)
                # If two cases shrink to the same case, they are the same finding.
                before = self.shrunk.get(one.is_of)
                self.shrunk[one.is_of] = one if before is None else before.joined(one)
            # Count last: if an interrupt ends the shrinking, `so_far` returns this case unshrunk.
            self.looked_at += 1
            keep()

    def _shrink(self, failed: _Failed) -> Found:
        """Shrink a case and write a bundle."""
        _, scenario, key, _ = failed
        # Judge the case again, because keeping the large event logs would take memory. Cases are
        # deterministic, so the finding is the same.
        result = marked(self.system.judge(scenario), scenario)
        # Keep the original case if the finding depends on its size or does not repeat.
        if not may_shrink(key) or key_of(result) != key:
            return self._written(failed, result)
        others = self.known.others(key, scenario)

        # Do not shrink into a known finding of the same kind: its cause is another.
        def may_run(other: Scenario) -> bool:
            has_other_cause = any(one.needs.met_by(other) for one in others)
            return self.system.may_run(other) and not has_other_cause

        reduced, best = shrink_finding(
            scenario,
            result,
            judge=self.system.judge,
            may_run=may_run,
            limits=Limits(seconds=self.job.shrink_seconds),
            is_over=lambda: self.stop.requested,
            right=right_judge(self.system.target, pool=self.system.pool, device=self.job.device),
        )
        one = self._written(failed._replace(scenario=reduced.scenario), marked(best, scenario))
        # If the search was interrupted, continue it when the campaign resumes.
        as_met = self.stop.requested and not reduced.complete
        return replace(one, complete=reduced.complete, as_met=as_met)

    def _written(self, failed: _Failed, result: CaseResult) -> Found:
        found = self._describe(failed, result)
        if result.verdict != "fail":
            return found
        # A replay needs the import path of an imported target. The case names a registered target.
        imported = self.job.target if ":" in self.job.target else ""
        folder, ran = Path(self.job.bundles), Ran(target=imported, device=self.job.device)
        try:
            path = write_bundle(failed.scenario, result, folder=folder, ran=ran)
        # A full disk only costs the bundle: the report contains the finding's case as TOML.
        except OSError as error:
            return replace(found, unkept=error.strerror or str(error))
        return replace(found, bundle=path.name)

    def _describe(self, failed: _Failed, result: CaseResult) -> Found:
        return Found(
            key=failed.key,
            message=result.findings[0].message if result.findings else result.error,
            seed=self.job.seed,
            case=failed.case,
            scenario=to_toml(failed.scenario),
            bundle="",
            text=self.render(result),
            size=in_words(failed.scenario),
            places=tuple(dict.fromkeys((failed.key.place, *places_of(result)))),
            apart=how_far_apart(result),
        )


@dataclass(kw_only=True, slots=True)
class _Batch:
    job: Job
    system: _System
    cases_from: Drawable[Scenario]
    findings: _Findings
    stop: Stop
    counts: Counts = field(default_factory=Counts)
    errors: Counter[str] = field(default_factory=Counter)
    """Number of cases with an error, by error."""
    cases_with: dict[str, int] = field(default_factory=dict)
    """Cases by feature, as bit masks; see `note_features`."""
    complete: bool = False
    futile: str = ""

    def run(self) -> BatchReport:
        started = time.monotonic()
        try:
            self.findings.take_up()
            self._explore_all()
            # Set before shrinking, because an interrupt during shrinking loses no case.
            self.complete = not self.stop.now
            # If a complete batch has no cases, the target refuses everything that can be drawn.
            if self.complete and not self.job.start and not self.counts.cases:
                self.futile = why_none_fits(self.system.target, options=dict(self.job.options))
            # Take the time now, because shrinking does not count.
            self.counts.seconds = time.monotonic() - started
            self.findings.shrink_all(self._keep)
        except KeyboardInterrupt:
            self.complete = False
        return self.report()

    def report(self) -> BatchReport:
        """Return the results so far."""
        return BatchReport(
            index=self.job.index,
            seed=self.job.seed,
            counts=self.counts,
            cases_with=dict(sorted(self.cases_with.items())),
            found=self.findings.so_far(),
            complete=self.complete,
            start=self.job.start,
            futile=self.futile,
        )

    def _explore_all(self) -> None:
        """Draw the batch's cases, the same in every run, and judge them."""
        # Draw cases of an earlier run again and skip them, because draws depend on each other.
        for scenario in islice(self._drawn(), self.job.start, self.job.cases):
            if self.stop.now:
                return
            self._explore(scenario)
            # If the first cases all end in the same error, the rest of the campaign will too.
            is_first_lot = self.counts.cases == BATCH_CASES
            if is_first_lot and set(self.errors.values()) == {BATCH_CASES}:
                (error,) = self.errors
                self.futile = f"all of its first {BATCH_CASES} cases end in the same error: {error}"
                return

    def _drawn(self) -> Iterator[Scenario]:
        """Yield cases, each followed by its family if any."""
        job, options = self.job, dict(self.job.options)
        # The simplest case is the same for all seeds, so only the first batch contains it.
        drawn = draws(self.cases_from, seed=str(job.seed), simplest=job.index == 0)
        for place, first in enumerate(drawn):
            yield first
            if job.family > 1 and has_family(first):
                yield from siblings(
                    first,
                    target=self.system.target,
                    most=job.family,
                    seed=f"{job.seed}/{place}",
                    then=lambda scenario: with_options(scenario, options),
                )

    def _explore(self, drawn: Scenario) -> None:
        scenario, counts = drawn, self.counts
        result = self.system.judge(scenario)
        # The index in the batch, not in this run, because twins must not depend on resumes.
        case = self.job.start + counts.cases
        # A twin with one step of SGD exposes a wrong gradient factor, which AdamW hides.
        if case % TWIN_EVERY == 0:
            judge = self.system.judge
            result = with_twin(result, scenario, judge=judge, find=lambda: self.system.target)
            # If the twin fails, shrink and keep the twin.
            scenario = result.twin or scenario
        counts.verdicts[result.verdict] += 1
        counts.params_only += result.passes_by_params_only
        if result.verdict == "error":
            self.errors[result.error] += 1
        counts.unobserved.update(result.unobserved)
        counts.taken.update(taken_notes(result))
        if result.verdict == "inconclusive" and result.findings:
            counts.unproved[str(result.findings[0].check)] += 1
        # Features of the drawn case, because the twin has another optimizer.
        note_features(self.cases_with, features_of(drawn), case=counts.cases)
        counts.cases += 1
        key = key_of(result)
        if key is None:
            return
        counts.keys[str(key)] += 1
        if self.findings.note(_Failed(case, scenario, key, how_far_apart(result)), result):
            self._keep()

    def _keep(self) -> None:
        """Write the findings so far to a file, so that they survive a crash."""
        report = self.report()
        if not self.job.unfinished or not report.found:
            return
        # If the disk is full, the campaign reports this when it saves the batch.
        with contextlib.suppress(OSError):
            write_whole(Path(self.job.unfinished), to_json(report).encode())


def warm_up(target: str, device: str) -> None:
    """Import everything that a target's batches need, which takes seconds.

    Raises:
        UsageError: The target does not exist.
        EnvironmentProblem: The device does not exist.
    """
    check_device(device)
    import_target(target)
    settle_memory()


def _aimed(scenario: Scenario, target: str) -> Scenario:
    """Return the case with its target set."""
    # Only registered targets are named in a case; see `with_target` in cli/options.py.
    named = SystemSpec().target if ":" in target else target
    return replace(scenario, system=replace(scenario.system, target=named))
