"""One batch of a campaign: draws cases, judges them, and shrinks what is new."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from zero_sim.backends import Stop, WorldPool, interrupts_ask
from zero_sim.bundle import Ran, write_bundle
from zero_sim.errors import ScenarioError, ZeroSimError
from zero_sim.findings.records import CaseResult, taken_notes, unforeseen
from zero_sim.fuzz.choices import ValuesFrom
from zero_sim.fuzz.coverage import note_features
from zero_sim.fuzz.drawing import draws
from zero_sim.fuzz.excluded import why_none_fits
from zero_sim.fuzz.families import has_family, siblings
from zero_sim.fuzz.features import features_of
from zero_sim.fuzz.known import KnownFindings
from zero_sim.fuzz.records import BATCH_CASES, BatchReport, Found, Job, size_in_words
from zero_sim.fuzz.strategies import drawn_cases
from zero_sim.host.device import check_device
from zero_sim.host.files import write_whole
from zero_sim.host.garbage import settle_memory
from zero_sim.judge.trajectory import Trajectories
from zero_sim.run import run_case
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
from zero_sim.targets import Target, import_target, refusals, with_options
from zero_sim.targets.options import check_said

Judge = Callable[[Scenario], CaseResult]
Render = Callable[[CaseResult], str]
"""What shows the result of a case to a person; a function of a module, as it travels."""


def run_batch(
    job: Job,
    render: Render,
    *,
    cases_from: ValuesFrom[Scenario] | None = None,
) -> BatchReport:
    """Run a batch; what its cases are depends on its seed, and on whether it is the first one.

    An interrupt ends it after the case at hand, with what was found so far; a second one at once,
    with what was not shrunk yet as it was met.

    Args:
        job: Which batch.
        render: What writes the text of a finding.
        cases_from: What draws the cases; where left out, `drawn_cases` for the target.

    Raises:
        UsageError: There is no such target.
        EnvironmentProblem: This machine lacks something that the cases need.
    """
    target = import_target(job.target)
    settle_memory()
    # What is imported first does not count.
    deadline = None if job.seconds is None else time.monotonic() + job.seconds
    stop = Stop(deadline=deadline)
    with interrupts_ask(stop), WorldPool() as pool:
        drawn = drawn_cases(target) if cases_from is None else cases_from
        if options := dict(job.options):
            check_said(target, options)
            # What the target refuses with them is no finding.
            drawn = drawn.map(lambda scenario: with_options(scenario, options)).filter(
                lambda scenario: not refusals(target, scenario)
            )

        trajectories = Trajectories() if job.family > 1 else None
        batch = _Batch(
            job=job,
            render=render,
            cases_from=drawn.map(lambda scenario: _aimed(scenario, job.target)),
            why_none_fits=lambda: why_none_fits(target, options=options),
            siblings=lambda first, place: siblings(
                first,
                target=target,
                most=job.family,
                seed=f"{job.seed}/{place}",
                then=lambda scenario: with_options(scenario, options),
            ),
            target=target,
            judge=lambda scenario: _judge(
                scenario,
                pool=pool,
                target=target,
                device=job.device,
                trajectories=trajectories,
            ),
            may_ask=lambda scenario: not refusals(target, scenario),
            right=right_judge(target, pool=pool, device=job.device),
            stop=stop,
        )
        return batch.run()


@dataclass(slots=True)
class _Batch:
    """One batch while it runs."""

    job: Job
    render: Render
    cases_from: ValuesFrom[Scenario]
    siblings: Callable[[Scenario, int], Iterator[Scenario]]
    """Other members of the family of a case, the one in this place of those that were drawn."""
    target: Target
    judge: Judge
    may_ask: Callable[[Scenario], bool]
    """Whether the target is there for a case; drawn ones are."""
    right: Judge | None
    """Judges with a system that is right, where there is another one than the target."""
    stop: Stop
    why_none_fits: Callable[[], str]
    """Names the declarations of the target that exclude every case."""
    cases: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    params_only: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    """Cases that could not be judged, by why."""
    keys: Counter[Key] = field(default_factory=Counter)
    unproved: Counter[str] = field(default_factory=Counter)
    unobserved: Counter[str] = field(default_factory=Counter)
    taken: set[str] = field(default_factory=set)
    cases_with: dict[str, int] = field(default_factory=dict)
    """By feature, which cases had it."""
    failed: list[tuple[int, Scenario, Key]] = field(default_factory=list)
    """Which cases have a finding, and which one."""
    apart: dict[int, float] = field(default_factory=dict)
    """By case that has a finding, how far apart values are; see `how_far_apart`."""
    met: dict[Key, Found] = field(default_factory=dict)
    """The first case of each key, as it was met."""
    looked_at: int = 0
    """How many of those that failed were made smaller, or show what is known."""
    known: KnownFindings = field(default_factory=KnownFindings)
    found: dict[tuple[object, ...], Found] = field(default_factory=dict)
    """New ones, shrunk."""
    seconds: float = 0.0
    complete: bool = False
    futile: str = ""

    def __post_init__(self) -> None:
        for each in self.job.known:
            self.known.add(each)

    def run(self) -> BatchReport:
        started = time.monotonic()
        try:
            self._take_up()
            self._explore_all()
            self.complete = not self.stop.now
            if self.complete and not self.job.start and not self.cases:
                self.futile = self.why_none_fits()
            self.seconds = time.monotonic() - started
            self._shrink_all()
        except KeyboardInterrupt:
            self.complete = False
        return self.report()

    def report(self) -> BatchReport:
        """What there is so far; what was not shrunk is told as it was met."""
        return BatchReport(
            index=self.job.index,
            seed=self.job.seed,
            asked=self.job.cases,
            cases=self.cases,
            seconds=self.seconds,
            verdicts=dict(self.verdicts),
            params_only=self.params_only,
            cases_with=dict(sorted(self.cases_with.items())),
            keys={str(key): count for key, count in self.keys.items()},
            unproved=dict(self.unproved),
            unobserved=dict(self.unobserved),
            taken=tuple(sorted(self.taken)),
            found=(*self.found.values(), *self._as_met()),
            complete=self.complete,
            start=self.job.start,
            futile=self.futile,
        )

    def _take_up(self) -> None:
        """Take up what an earlier part of this batch has met and left as it was."""
        for one in self.job.unshrunk:
            try:
                scenario = one.case_again()
            except ScenarioError:
                continue  # Of another version: it stays as it is.
            self.failed.append((one.case, scenario, one.key))
            self.apart[one.case] = one.apart
            self.met[one.key] = one

    def _explore_all(self) -> None:
        """Draw the batch's cases, always the same ones, and judge them."""
        for scenario in islice(self._drawn(), self.job.start, self.job.cases):
            if self.stop.now:
                return
            self._explore(scenario)
            if self.cases == BATCH_CASES and set(self.errors.values()) == {BATCH_CASES}:
                (error,) = self.errors
                self.futile = f"all of its first {BATCH_CASES} cases end in the same error: {error}"
                return

    def _drawn(self) -> Iterator[Scenario]:
        """Case after case, each with its family behind it, if it has one."""
        # The simplest case is the same in all batches, and so would its family be.
        drawn = draws(self.cases_from, seed=str(self.job.seed), simplest=self.job.index == 0)
        for place, first in enumerate(drawn):
            yield first
            if self.job.family > 1 and has_family(first):
                yield from self.siblings(first, place)

    def _explore(self, drawn: Scenario) -> None:
        scenario = drawn
        result = self.judge(scenario)
        case = self.job.start + self.cases
        if case % TWIN_EVERY == 0:
            result = with_twin(result, scenario, judge=self.judge, find=lambda: self.target)
            # What fails is made smaller, kept and judged again by itself.
            scenario = result.twin or scenario
        self.verdicts[result.verdict] += 1
        self.params_only += result.passes_by_params_only
        if result.verdict == "error":
            self.errors[result.error] += 1
        self.unobserved.update(result.unobserved)
        self.taken.update(taken_notes(result))
        if result.verdict == "inconclusive" and result.findings:
            self.unproved[str(result.findings[0].check)] += 1
        note_features(self.cases_with, features_of(drawn), case=self.cases)
        self.cases += 1
        key = key_of(result)
        if key is None:
            return
        self.keys[key] += 1
        self.failed.append((case, scenario, key))
        self.apart[case] = how_far_apart(result)
        if key not in self.met:
            self.met[key] = self._describe(key, case, scenario, result, as_met=True)
            self._keep()

    def _keep(self) -> None:
        """Write what was found so far, lest it is lost with this process."""
        report = self.report()
        if not self.job.unfinished or not report.found:
            return
        # Whoever keeps the whole report finds out, too, and says so.
        with contextlib.suppress(OSError):
            write_whole(Path(self.job.unfinished), json.dumps(report.as_dict()).encode())

    def _as_met(self) -> Iterable[Found]:
        """What is new among what nobody has made smaller."""
        new: dict[Key, Found] = {}
        for _, scenario, key in self.failed[self.looked_at :]:
            if key not in new and not self.known.explain(key, scenario):
                new[key] = self.met[key]
        return new.values()

    def _shrink_all(self) -> None:
        """Shrink a case of each finding that is not known by then.

        Of one check the case comes first whose values are furthest apart: the others may show what
        was rounded on the way.
        """
        checks = {key.check: place for place, (_, _, key) in reversed([*enumerate(self.failed)])}
        self.failed.sort(key=lambda one: (checks[one[2].check], -self.apart[one[0]]))
        for case, scenario, key in self.failed:
            if not self.known.explain(key, scenario):
                one = self._shrunk(key, case, scenario)
                self.known.add(one)
                # Two ways into one smallest case are one finding.
                before = self.found.get(one.is_of)
                self.found[one.is_of] = one if before is None else before.joined(one)
            self.looked_at += 1
            self._keep()

    def _shrunk(self, key: Key, case: int, scenario: Scenario) -> Found:
        """Shrink a case and write what is left as a bundle."""
        # Not kept from before: event logs are large. What is drawn fails again as it did.
        result = marked(self.judge(scenario), scenario)
        if not may_shrink(key) or key_of(result) != key:
            return self._written(key, case, scenario, result, complete=False)
        others = self.known.others(key, scenario)

        def may_ask(other: Scenario) -> bool:
            return self.may_ask(other) and not any(one.has_what_it_takes(other) for one in others)

        reduced, best = shrink_finding(
            scenario,
            result,
            judge=self.judge,
            may_ask=may_ask,
            limits=Limits(seconds=self.job.shrink_seconds),
            is_over=lambda: self.stop.asked,
            right=self.right,
        )
        best = marked(best, scenario)
        one = self._written(key, case, reduced.scenario, best, complete=reduced.complete)
        return replace(one, as_met=self.stop.asked and not reduced.complete)

    def _written(
        self, key: Key, case: int, scenario: Scenario, result: CaseResult, *, complete: bool
    ) -> Found:
        found = replace(self._describe(key, case, scenario, result), complete=complete)
        if result.verdict != "fail":
            return found
        imported = self.job.target if ":" in self.job.target else ""
        folder, ran = Path(self.job.bundles), Ran(target=imported, device=self.job.device)
        try:
            path = write_bundle(scenario, result, folder=folder, ran=ran)
        except OSError as error:
            return replace(found, unkept=error.strerror or str(error))
        return replace(found, bundle=path.name)

    def _describe(
        self, key: Key, case: int, scenario: Scenario, result: CaseResult, *, as_met: bool = False
    ) -> Found:
        first = result.findings[0].message if result.findings else result.error
        return Found(
            key=key,
            message=first,
            seed=self.job.seed,
            case=case,
            scenario=to_toml(scenario),
            bundle="",
            text=self.render(result),
            size=size_in_words(scenario),
            places=tuple(dict.fromkeys((key.place, *places_of(result)))),
            as_met=as_met,
            apart=how_far_apart(result),
        )


def warm_up(target: str, device: str) -> None:
    """Import what batches of a target need, which takes seconds, before any clock runs.

    Raises:
        UsageError: There is no such target.
        EnvironmentProblem: There is no such device.
    """
    check_device(device)
    import_target(target)
    settle_memory()


def _aimed(scenario: Scenario, target: str) -> Scenario:
    """The case with the target that it is for; a file can name a registered one only."""
    named = SystemSpec().target if ":" in target else target
    return replace(scenario, system=replace(scenario.system, target=named))


def _judge(
    scenario: Scenario,
    *,
    pool: WorldPool,
    target: Target,
    device: str,
    trajectories: Trajectories | None,
) -> CaseResult:
    """Judge a case; an error that nobody foresaw is a finding, too, and costs no other case."""
    try:
        return run_case(
            scenario,
            pool=pool,
            target=target,
            device=device,
            trajectories=trajectories,
            with_digest=False,
        )
    except ZeroSimError:
        raise
    except Exception as error:  # noqa: BLE001
        return unforeseen(error, id=scenario.name)
