"""The search: replace a case by a smaller case, as long as one still fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from zero_sim.scenario.rules import check_scenario
from zero_sim.scenario.spec import Scenario
from zero_sim.shrink.candidates import PASSES
from zero_sim.shrink.size import Order, Size, order_of, size_of

CASES_MAX = 2000

Stopped = Literal["cases", "seconds", "interrupt"]
"""Reason for an early end: a limit, or `is_over`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of a search."""

    cases: int = CASES_MAX
    seconds: float = float("inf")
    """Wall-clock limit. With a limit, the result depends on the machine's speed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduced:
    """Result of a search."""

    scenario: Scenario
    """Smallest failing case that was found."""
    size: Size
    before: Size
    """Size of the original case."""
    cases: int
    """Number of cases run."""
    seconds: float
    stopped: Stopped | None
    """None if the search ended because no smaller candidate fails."""

    @property
    def complete(self) -> bool:
        """True if no smaller candidate fails."""
        return self.stopped is None


def shrink(
    scenario: Scenario,
    *,
    fails: Callable[[Scenario], bool],
    may_run: Callable[[Scenario], bool] = lambda other: True,
    limits: Limits | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> Reduced:
    """Make a failing case smaller until no smaller candidate fails.

    The search is greedy and deterministic: first fewer ranks, then fewer params, smaller params,
    fewer steps and fewer features. Each candidate is valid, not empty, smaller than the current
    best, and runs once. Unlike in delta debugging (Zeller and Hildebrandt, 2002), dependent
    settings change together, so the search does not need intermediate cases that do not fail.

    Args:
        scenario: A failing case, which is not run again.
        fails: Runs a valid case, and returns True if it has the finding to keep.
        may_run: Returns False for a valid case that must not run.
        limits: Limits of the search.
        is_over: Called before each case; True ends the search.
    """
    search = _Search(
        fails=fails,
        may_run=may_run,
        limits=limits or Limits(),
        is_over=is_over,
        best=scenario,
        order=order_of(scenario),
    )
    search.run()
    return Reduced(
        scenario=search.best,
        size=size_of(search.best),
        before=size_of(scenario),
        cases=search.cases,
        seconds=time.monotonic() - search.started,
        stopped=search.stopped,
    )


@dataclass(slots=True)
class _Search:
    """State of a running search."""

    fails: Callable[[Scenario], bool]
    may_run: Callable[[Scenario], bool]
    limits: Limits
    is_over: Callable[[], bool]
    best: Scenario
    order: Order
    cases: int = 0
    stopped: Stopped | None = None
    known: set[Scenario] = field(default_factory=set)
    """Cases that were tried or skipped."""
    started: float = field(default_factory=time.monotonic)

    def run(self) -> None:
        before: Scenario | None = None
        # Repeat all passes until none finds a smaller case, because one pass often enables another.
        while before != self.best and self.stopped is None:
            before = self.best
            for candidates in PASSES:
                while any(map(self._is_better, candidates(self.best))):
                    # `any` stops at the first better candidate. Then the pass starts again from it.
                    pass

    def _is_better(self, candidate: Scenario) -> bool:
        """Replace the best case by a candidate that fails and is smaller; return True if so."""
        if candidate in self.known or self.stopped is not None:
            return False
        order = order_of(candidate)
        # Cheap tests first, because most candidates are larger or invalid.
        if order >= self.order or check_scenario(candidate):
            return False
        # An empty case computes nothing, so it cannot fail for the same reason.
        if order[0].elements == 0 < self.order[0].elements:
            return False
        self.stopped = self._why_end()
        if self.stopped is not None:
            return False
        # Add it first, so that skipped cases are not tried again either.
        self.known.add(candidate)
        if not self.may_run(candidate):
            return False
        self.cases += 1
        if not self.fails(candidate):
            return False
        self.best, self.order = candidate, order
        return True

    def _why_end(self) -> Stopped | None:
        if self.is_over():
            return "interrupt"
        if self.cases >= self.limits.cases:
            return "cases"
        elapsed = time.monotonic() - self.started
        return "seconds" if elapsed > self.limits.seconds else None
