"""The search: one smaller case after another, as long as one of them still fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from zero_sim.scenario.rules import check_scenario
from zero_sim.scenario.spec import Scenario
from zero_sim.shrink.candidates import PASSES
from zero_sim.shrink.size import Order, Size, order_of, size_of

CASES_MAX = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """When a search ends that has not come to its end."""

    cases: int = CASES_MAX
    seconds: float = float("inf")
    """With a limit of this kind the machine's speed can decide what is found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduced:
    """What a search came to."""

    scenario: Scenario
    """The smallest case that fails, of those that were tried."""
    size: Size
    cases: int
    """Cases that were run."""
    seconds: float
    complete: bool
    """Whether nothing smaller that would be tried fails; False where a limit ended the search."""


def shrink(
    scenario: Scenario,
    *,
    fails: Callable[[Scenario], bool],
    limits: Limits | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> Reduced:
    """Make a failing case smaller until nothing smaller that is tried fails.

    Greedy and deterministic: first fewer ranks, then fewer params, smaller ones, fewer steps and
    fewer features, again and again, since one often makes way for another. Of what is tried each
    case is valid, smaller than the smallest so far, and run once. Unlike in delta debugging (Zeller
    and Hildebrandt, 2002) what belongs together is changed together, so that the way need not lead
    through cases that do not fail.

    Args:
        scenario: A case for which `fails` is true; it is not run again.
        fails: Whether a valid case has the finding that is being shrunk.
        limits: When to end, whatever has come of it.
        is_over: Asked before each case, whether to end now.
    """
    search = _Search(
        fails=fails,
        limits=limits or Limits(),
        is_over=is_over,
        best=scenario,
        order=order_of(scenario),
    )
    search.run()
    return Reduced(
        scenario=search.best,
        size=size_of(search.best),
        cases=search.cases,
        seconds=time.monotonic() - search.started,
        complete=not search.is_spent,
    )


@dataclass(slots=True)
class _Search:
    """A search while it runs."""

    fails: Callable[[Scenario], bool]
    limits: Limits
    is_over: Callable[[], bool]
    best: Scenario
    order: Order
    cases: int = 0
    is_spent: bool = False
    known: set[Scenario] = field(default_factory=set)
    """Cases that were tried; all but the smallest so far do not fail, or are larger."""
    started: float = field(default_factory=time.monotonic)

    def run(self) -> None:
        before: Scenario | None = None
        while before != self.best and not self.is_spent:
            before = self.best
            for candidates in PASSES:
                while any(map(self._is_better, candidates(self.best))):
                    pass

    def _is_better(self, candidate: Scenario) -> bool:
        """Try a case, unless that is pointless; whether it is the smallest so far."""
        if candidate in self.known or self.is_spent:
            return False
        order = order_of(candidate)
        if order >= self.order or check_scenario(candidate):
            return False
        self.is_spent = self._must_end()
        if self.is_spent:
            return False
        self.known.add(candidate)
        self.cases += 1
        if not self.fails(candidate):
            return False
        self.best, self.order = candidate, order
        return True

    def _must_end(self) -> bool:
        elapsed = time.monotonic() - self.started
        limits = self.limits
        return self.cases >= limits.cases or elapsed > limits.seconds or self.is_over()
