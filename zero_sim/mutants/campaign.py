"""A campaign: drawn cases against a broken system, until one of them finds that it is broken.

[Note: what a mutant takes]
The mutants that take longest are those that few cases can show. Drawing a case takes a hundredth
of judging it, so cases that lack what the smallest case on record of a mutant has are judged last,
once as many were drawn as it may survive. That shows no more than judging all would: whichever
finds it stands in the series at the place that is told, and none survives before all were judged.
Of 352 mutants that were hunted both ways 304 are found by the same case, 48 by a later one. All 377
take 9,056 drawn cases, of which 1,265 are judged, in a quarter of the time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch

from zero_sim.backends.pool import share_out
from zero_sim.backends.worlds import WorldPool
from zero_sim.fuzz.choices import Drawable
from zero_sim.fuzz.drawing import draws
from zero_sim.fuzz.known import NOTHING, Needs
from zero_sim.fuzz.strategies import drawn_cases
from zero_sim.mutants.catalogue import find_mutants
from zero_sim.mutants.records import Mutant, Trial
from zero_sim.mutants.smallest import smallest_cases
from zero_sim.rules.judging import run_case
from zero_sim.run import CaseResult
from zero_sim.scenario.dump import to_chosen_toml
from zero_sim.scenario.spec import Scenario
from zero_sim.shrink import Limits, Reduced, shrink, size_of

CASES_MAX = 2000
"""Cases that a mutant may survive before it counts as a survivor."""
SHRINK_CASES_MAX = 2000
"""Cases after which shrinking ends; in cases, so that what is found does not depend on speed."""
_MORE_CASES_MIN = 100
_MORE_TIMES = 5
"""So many cases more, and so many times as many, are drawn for a case to begin shrinking with."""
REFUSED = "refused"
"""What found it, where the broken system refuses a valid case before it begins."""
DRAWING = "drawing"
"""What found it, where not even a case can be drawn: the generator plans layouts, too."""


class HarnessFailed(Exception):
    """The judge itself failed on a case, which says nothing about the mutant."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """How long a mutant is hunted."""

    cases_max: int = CASES_MAX
    seed: int = 0
    shrinks: bool = False
    """Whether the case that finds a mutant is made as small as it goes."""
    every_case: bool = False
    """Whether cases are judged in the order in which they are drawn, whatever they have."""


@dataclass(slots=True)
class _Hunt:
    """One mutant's campaign while it runs."""

    pool: WorldPool
    drawn: Iterator[Scenario]
    needs: Needs = NOTHING
    cases: int = 0
    """Those that were drawn."""
    judged: int = 0
    seconds: float = 0.0
    check: str = ""
    found: Scenario | None = None
    place: int = 0
    """Of the case that found it, the first being 1."""
    lacking: deque[tuple[int, Scenario]] = field(default_factory=deque)
    """Places and cases that were not judged; see [Note: what a mutant takes]."""

    def search(self, *, cases_max: int) -> None:
        """Draw cases until one finds it, or so many were judged."""
        while self.found is None and self.cases < cases_max:
            try:
                scenario = next(self.drawn, None)
            # Whatever a broken layout raises; the generator itself raises nothing.
            except Exception:  # noqa: BLE001
                self.check, self.place = DRAWING, self.cases
                return
            if scenario is None:
                break
            self.cases += 1
            if self.needs.met_by(scenario):
                self._try(scenario, place=self.cases)
            else:
                self.lacking.append((self.cases, scenario))
        while self.found is None and self.lacking:
            place, scenario = self.lacking.popleft()
            self._try(scenario, place=place)

    def _try(self, scenario: Scenario, *, place: int) -> None:
        """Run a case, and keep it if it finds the mutant."""
        started = time.process_time()
        check = found_by(self.run(scenario))
        self.judged += 1
        self.seconds += time.process_time() - started
        if check:
            self.check, self.found, self.place = check, scenario, place

    def run(self, scenario: Scenario) -> CaseResult:
        """Run a case, against whatever is broken now."""
        return run_case(scenario, pool=self.pool)


def found_by(result: CaseResult) -> str:
    """The check that found something wrong in a case; empty where none did.

    Raises:
        HarnessFailed: The case was not judged.
    """
    if result.verdict == "fail":
        return result.findings[0].check
    if result.verdict == "error":
        if result.findings:
            raise HarnessFailed(f"{result.error}\n{result.findings[0].detail}")
        return REFUSED
    return ""


def hunt(
    mutant: Mutant,
    *,
    pool: WorldPool,
    budget: Budget | None = None,
    cases: Drawable[Scenario] | None = None,
) -> Trial:
    """Run cases against one mutant until it is found or the budget is spent.

    Args:
        mutant: What is broken; it is mended when this returns.
        pool: Worlds to run on.
        budget: How long to go on.
        cases: What is drawn; what `zero-sim fuzz` draws where left out.
    """
    budget = budget or Budget()
    drawn_from = drawn_cases() if cases is None else cases
    # A series of its own, or all mutants would share the luck of one.
    drawn = draws(drawn_from, seed=f"{budget.seed}/{mutant.id}")
    known = smallest_cases().get(mutant.id)
    needs = NOTHING if known is None or budget.every_case else Needs.of(known)
    trial = _Hunt(pool=pool, drawn=drawn, needs=needs)
    error = ""
    with mutant.apply() as patches:
        try:
            trial.search(cases_max=budget.cases_max)
        except HarnessFailed as failed:
            error = str(failed)
    if patches.outdated:
        error = f"the mutant no longer fits the system: {patches.outdated}; write it anew"
    outcome = Trial(
        id=mutant.id,
        killed=bool(trial.check) and not error,
        check=trial.check,
        cases=trial.place or trial.cases,
        judged=trial.judged,
        seconds=trial.seconds,
        armed=patches.armed,
        error=error,
    )
    if not budget.shrinks or trial.found is None or error:
        return outcome
    small = _shrunk(trial, mutant)
    return replace(
        outcome,
        size=small.size,
        minimum=None if known is None else size_of(known),
        smallest=to_chosen_toml(small.scenario),
    )


def _shrunk(trial: _Hunt, mutant: Mutant) -> Reduced:
    """The smallest case that finds a mutant and that the system as it is passes.

    One that the system as it is does not pass might be about something else than the mutant, as the
    accuracy of a model too small for any. Where the case that was found is inconclusive
    without the mutant, another is drawn to begin with.
    """
    assert trial.found is not None
    first, limit = trial.found, trial.cases + max(_MORE_CASES_MIN, _MORE_TIMES * trial.cases)
    while trial.found is not None and _verdict(trial, trial.found) != "pass":
        trial.found = None
        with mutant.apply(), suppress(HarnessFailed):
            trial.search(cases_max=limit)
    start = trial.found or first
    wanted = {"pass"} if trial.found is not None else {"pass", "inconclusive"}

    def finds(scenario: Scenario) -> bool:
        try:
            with mutant.apply():
                is_found = found_by(trial.run(scenario))
        except HarnessFailed:
            return False
        verdict = _verdict(trial, scenario) if is_found else ""
        if verdict == "pass":
            wanted.discard("inconclusive")
        return verdict in wanted

    return shrink(start, fails=finds, limits=Limits(cases=SHRINK_CASES_MAX))


def _verdict(trial: _Hunt, scenario: Scenario) -> str:
    return trial.run(scenario).verdict


def run_campaign(
    ids: Sequence[str], *, budget: Budget | None = None, jobs: int = 1
) -> Iterator[Trial]:
    """Hunt mutants, several at a time; yield each trial as it ends.

    Args:
        ids: Of the mutants.
        budget: For each of them.
        jobs: Processes; 1 for this one. One that dies costs the mutant that it was given.
    """
    budget = budget or Budget()
    if jobs == 1 or len(ids) < 2:
        with WorldPool() as pool:
            for mutant in find_mutants(ids):
                yield hunt(mutant, pool=pool, budget=budget)
        return
    for place, done in share_out(_hunt_one, [(id, budget) for id in ids], jobs=jobs):
        try:
            yield done.result()
        except BrokenExecutor:
            error = "the process ended at this mutant; try --jobs 1, which shows where"
            yield Trial(id=ids[place], killed=False, error=error)


def _hunt_one(id: str, budget: Budget) -> Trial:
    """Hunt one mutant in a process that is there for nothing else, in a pool of its own."""
    torch.set_num_threads(1)
    (mutant,) = find_mutants([id])
    with WorldPool() as pool:
        return hunt(mutant, pool=pool, budget=budget)


def check_unbroken(*, pool: WorldPool, budget: Budget) -> Trial:
    """Run the campaign against the system as it is, which nothing must be found in.

    Args:
        pool: Worlds to run on.
        budget: How many cases to run.
    """
    trial = _Hunt(pool=pool, drawn=draws(drawn_cases(), seed=f"{budget.seed}/none"))
    trial.search(cases_max=budget.cases_max)
    return Trial(
        id="none",
        killed=bool(trial.check),
        check=trial.check,
        cases=trial.cases,
        judged=trial.judged,
        seconds=trial.seconds,
    )
