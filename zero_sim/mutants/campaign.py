"""A campaign: drawn cases against a broken system, until one of them finds that it is broken."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from random import Random
from typing import Protocol

from hypothesis import HealthCheck, Phase, find, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from zero_sim.launch import WorldPool
from zero_sim.launch.lifeline import end_with_parent
from zero_sim.mutants.cases import campaign_cases
from zero_sim.mutants.catalogue import find_mutants
from zero_sim.mutants.records import Trial
from zero_sim.scenario.spec import Scenario
from zero_sim.targets import Target
from zero_sim.verify import CaseResult, run_case

CASES_MAX = 2000
"""Cases that a mutant may survive before it counts as a survivor."""
SHRINK_SECONDS_MAX = 5.0
_BATCH_CASES = 6
REFUSED = "refused"
"""What found it, where the broken system refuses a valid case before it begins."""


class HarnessFailed(Exception):
    """The judge itself failed on a case, which says nothing about the mutant."""


class Armed(Protocol):
    """What tells whether broken code ran."""

    @property
    def armed(self) -> int:
        """How often it did."""
        ...


class Broken(Protocol):
    """A system that is broken on purpose: a mutant, or a change of its code."""

    @property
    def id(self) -> str:
        """Unique; cases are drawn from it."""
        ...

    def apply(self) -> AbstractContextManager[Armed]:
        """Break the system of this process, and mend it again."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """How long a mutant is hunted."""

    cases_max: int = CASES_MAX
    seed: int = 0
    shrinks: bool = False
    """Whether the case that finds a mutant is made smaller."""


@dataclass(slots=True)
class _Hunt:
    """One mutant's campaign while it runs."""

    pool: WorldPool
    cases_max: int
    target: Target | None = None
    cases: int = 0
    seconds: float = 0.0
    check: str = ""
    smallest: Scenario | None = None
    deadline: float = float("inf")
    known: dict[Scenario, bool] = field(default_factory=dict)
    """Cases that were run, and whether they found it: Hypothesis draws some again and again."""

    def finds(self, scenario: Scenario) -> bool:
        """Run a case, unless it is known; whether it is one that finds the mutant."""
        if scenario in self.known:
            return self.known[scenario]
        is_spent = not self.check and self.cases >= self.cases_max
        if is_spent or time.perf_counter() > self.deadline:
            return False
        started = time.process_time()
        check = found_by(run_case(scenario, pool=self.pool, target=self.target))
        self.known[scenario] = bool(check)
        if not self.check:
            self.cases += 1
            self.seconds += time.process_time() - started
            self.check = check
        if check:
            self.smallest = scenario
            self.deadline = min(self.deadline, time.perf_counter() + SHRINK_SECONDS_MAX)
        return bool(check)


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
    mutant: Broken,
    *,
    pool: WorldPool,
    budget: Budget | None = None,
    cases: st.SearchStrategy[Scenario] | None = None,
    target: Target | None = None,
) -> Trial:
    """Run cases against one mutant until it is found or the budget is spent.

    Args:
        mutant: What is broken; it is mended when this returns.
        pool: Worlds to run on.
        budget: How long to go on.
        cases: What is drawn; the standard campaign where left out.
        target: The system that is broken; the one that cases name where left out.
    """
    budget = budget or Budget()
    trial = _Hunt(pool=pool, cases_max=budget.cases_max, target=target)
    strategy = campaign_cases() if cases is None else cases
    error = ""
    with mutant.apply() as patches:
        try:
            # Of its own, or all mutants would share the luck of one series of cases.
            _search(trial, strategy, budget, series=mutant.id)
        except HarnessFailed as failed:
            error = str(failed)
    small = trial.smallest if budget.shrinks else None
    return Trial(
        id=mutant.id,
        killed=bool(trial.check),
        check=trial.check,
        cases=trial.cases,
        seconds=trial.seconds,
        armed=patches.armed,
        ranks=None if small is None else small.world.size,
        params=None if small is None or small.model.shapes is None else len(small.model.shapes),
        error=error,
    )


def _search(
    trial: _Hunt, strategy: st.SearchStrategy[Scenario], budget: Budget, *, series: str
) -> None:
    phases = [Phase.generate, Phase.shrink] if budget.shrinks else [Phase.generate]
    chosen = settings(
        max_examples=_BATCH_CASES,
        phases=phases,
        database=None,
        deadline=None,
        derandomize=False,
        suppress_health_check=list(HealthCheck),
    )
    batch = 0
    # In small batches: within one, Hypothesis varies what it drew before, so that cases are alike
    # and a third of them the same. All begin with the simplest case, which is run once.
    while not trial.check and trial.cases < budget.cases_max:
        batch += 1
        with suppress(NoSuchExample):
            find(
                strategy,
                trial.finds,
                settings=chosen,
                random=Random(f"{budget.seed}/{series}/{batch}"),
            )


def run_campaign(
    ids: Sequence[str], *, budget: Budget | None = None, jobs: int = 1
) -> Iterator[Trial]:
    """Hunt mutants, several at a time; yield each trial as it ends.

    Args:
        ids: Of the mutants.
        budget: For each of them.
        jobs: Processes; 1 for this one.
    """
    budget = budget or Budget()
    if jobs == 1 or len(ids) < 2:
        with WorldPool() as pool:
            for mutant in find_mutants(ids):
                yield hunt(mutant, pool=pool, budget=budget)
        return
    # Not forked: rank threads do not survive it.
    context = get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_calm) as executor:
        pending = [executor.submit(hunt_one, one, budget=budget) for one in ids]
        try:
            for done in as_completed(pending):
                yield done.result()
        finally:
            for waiting in pending:
                waiting.cancel()


def _calm() -> None:
    import torch

    end_with_parent()
    torch.set_num_threads(1)


def hunt_one(id: str, *, budget: Budget) -> Trial:
    """Hunt one mutant in a pool of its own; for worker processes."""
    (mutant,) = find_mutants([id])
    with WorldPool() as pool:
        return hunt(mutant, pool=pool, budget=budget)


def check_unbroken(*, pool: WorldPool, budget: Budget) -> Trial:
    """Run the campaign against the system as it is, which nothing must be found in.

    Args:
        pool: Worlds to run on.
        budget: How many cases to run.
    """
    trial = _Hunt(pool=pool, cases_max=budget.cases_max)
    _search(trial, campaign_cases(), replace(budget, shrinks=False), series="none")
    return Trial(
        id="none",
        killed=bool(trial.check),
        check=trial.check,
        cases=trial.cases,
        seconds=trial.seconds,
    )
