"""Schedules: policies that pick the next rank among those that can run.

A run is a function of (program, timing, schedule, seed). Two runs with equal inputs give equal
event logs. A schedule serves one run; a recipe makes a fresh one for each run.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from zero_sim.errors import UsageError
from zero_sim.sim.failures import ScheduleDiverged

SCHEDULES = ("round-robin", "random", "pct")

PICKS_PER_RANK = 16
"""Expected picks of a run per rank, over which `pct` spreads its changes of priority."""


class Schedule(Protocol):
    """A policy over ready ranks. Each instance serves one run."""

    def add(self, rank: int) -> None:
        """Note that `rank` became able to run."""
        ...

    def defer(self, rank: int) -> None:
        """Note that `rank` polled for something that is not done, and will poll again.

        A policy must not always prefer such a rank, or the others would never finish the work.
        """
        ...

    def pick(self) -> int | None:
        """Remove and return the rank to run next; None if no rank is ready."""
        ...


class Recipe(Protocol):
    """Maker of a schedule for each run."""

    def fresh(self) -> Schedule:
        """Return a schedule for one run."""
        ...


class RoundRobin:
    """First ready, first served."""

    def __init__(self) -> None:
        self._ready: deque[int] = deque()

    def add(self, rank: int) -> None:
        """Queue the rank after all ready ones."""
        self._ready.append(rank)

    defer = add

    def pick(self) -> int | None:
        """Return the rank that has been ready longest."""
        return self._ready.popleft() if self._ready else None


class RandomSchedule:
    """Uniform choice among ready ranks, drawn from the seed."""

    def __init__(self, seed: int) -> None:
        # A list, because the seed must also reproduce its order.
        self._ready: list[int] = []
        self._random = random.Random(seed)

    def add(self, rank: int) -> None:
        """Make the rank eligible."""
        self._ready.append(rank)

    defer = add

    def pick(self) -> int | None:
        """Return a uniformly drawn ready rank."""
        if not self._ready:
            return None
        return self._ready.pop(self._random.randrange(len(self._ready)))


class Pct:
    """Probabilistic concurrency testing: the ready rank of highest priority, with few changes.

    Priorities are drawn. At each of `depth - 1` drawn picks, the rank about to run drops below all
    others. If a bug needs `depth` events in one order, a run finds it with a probability of at
    least `1 / (ranks * picks ** (depth - 1))` (Burckhardt et al., "A randomized scheduler with
    probabilistic guarantees of finding bugs", 2010).

    Args:
        seed: Seed of the draws.
        world_size: Number of ranks.
        depth: Number of events whose order the bug needs, at least 1.
        picks: Expected number of picks of the run.
    """

    def __init__(self, seed: int, *, world_size: int, depth: int, picks: int) -> None:
        draws = random.Random(seed)
        # Initial priorities start at `depth`; values below are for the drops, as in the paper.
        self._priority = list(range(depth, depth + world_size))
        draws.shuffle(self._priority)
        changes = draws.sample(range(picks), min(depth - 1, picks))
        self._changes = {position: depth - 1 - i for i, position in enumerate(changes)}
        self._picked = 0
        # Deferred ranks get priorities below 0, each lower than all before.
        self._lowest = 0
        self._ready: list[int] = []

    def add(self, rank: int) -> None:
        """Make the rank eligible."""
        self._ready.append(rank)

    def defer(self, rank: int) -> None:
        """Make the rank eligible once no other is ready."""
        self._lowest -= 1
        self._priority[rank] = self._lowest
        self._ready.append(rank)

    def pick(self) -> int | None:
        """Return the ready rank of highest priority."""
        if not self._ready:
            return None
        rank = max(self._ready, key=self._priority.__getitem__)
        changed = self._changes.get(self._picked)
        self._picked += 1
        # Drop the rank that would run now, then choose again.
        if changed is not None:
            self._priority[rank] = changed
            rank = max(self._ready, key=self._priority.__getitem__)
        self._ready.remove(rank)
        return rank


class Choosing:
    """Follows the numbers of `Choices`, and records the number of ready ranks at each pick."""

    def __init__(self, choices: Sequence[int]) -> None:
        self._choices = choices
        self._ready: list[int] = []
        # Shrinking and exhaustive search read the widths to find other choices.
        self.widths: list[int] = []

    def add(self, rank: int) -> None:
        """Queue the rank after all ready ones."""
        self._ready.append(rank)

    defer = add

    def pick(self) -> int | None:
        """Return the ready rank that this pick's number selects."""
        if not self._ready:
            return None
        position = len(self.widths)
        self.widths.append(len(self._ready))
        # Beyond the list, the rank that has been ready longest.
        choice = self._choices[position] if position < len(self._choices) else 0
        return self._ready.pop(choice % len(self._ready))


@dataclass(frozen=True, slots=True)
class Choices:
    """A schedule as a list of numbers. Shorter lists of smaller numbers are simpler, for shrinking.

    Pick number `i` takes the ready rank at index `choices[i]`, modulo the number of ready ranks.
    Index 0 is the rank that has been ready longest. Picks beyond the list use index 0, so an empty
    list is round-robin.
    """

    choices: tuple[int, ...] = ()

    def fresh(self) -> Schedule:
        """Return a schedule for one run."""
        return Choosing(self.choices)


class Replaying:
    """Picks the recorded ranks in their order."""

    def __init__(self, turns: Sequence[int], *, strict: bool) -> None:
        self._turns = turns
        self._strict = strict
        self._position = 0
        self._ready: list[int] = []
        self.diverged_at: int | None = None

    def add(self, rank: int) -> None:
        """Make the rank eligible."""
        self._ready.append(rank)

    defer = add

    def pick(self) -> int | None:
        """Return the rank that the recording has at this turn.

        Raises:
            ScheduleDiverged: With `strict`, that rank cannot run, or the recording is over.
        """
        if not self._ready:
            return None
        position, self._position = self._position, self._position + 1
        turn = self._turns[position] if position < len(self._turns) else None
        if turn in self._ready and self.diverged_at is None:
            self._ready.remove(turn)
            return turn
        if self._strict:
            over = f"to end after {position} turns"
            expected = over if turn is None else f"rank {turn} to run at turn {position}"
            raise _diverged(position, expected, sorted(self._ready))
        # Once diverged, the rest of the recording means nothing: first come, first served.
        if self.diverged_at is None:
            self.diverged_at = position
        return self._ready.pop(0)


def _diverged(position: int, expected: str, ready: list[int]) -> ScheduleDiverged:
    return ScheduleDiverged(
        f"the run diverged from its recording: expected {expected}, but the ranks that can run "
        f"there are {ready}. Replay with the program, world size, timing and seed recorded.",
        position=position,
    )


class Replay:
    """A recorded schedule, repeated turn by turn.

    Args:
        turns: `EventLog.turns` of the run to repeat.
        strict: True to raise if a turn cannot be taken. Otherwise the run goes on from there, first
            come, first served.
    """

    def __init__(self, turns: Sequence[int], *, strict: bool = True) -> None:
        self.turns = tuple(turns)
        self.strict = strict
        # The schedule of the latest run, for `diverged_at`.
        self._latest: Replaying | None = None

    @property
    def diverged_at(self) -> int | None:
        """First turn of the latest run that differs from the recording, from 0; else None."""
        return None if self._latest is None else self._latest.diverged_at

    def fresh(self) -> Schedule:
        """Return a schedule for one run."""
        self._latest = Replaying(self.turns, strict=self.strict)
        return self._latest


def check_schedule(schedule: object) -> None:
    """Check that a schedule is a known name or a recipe.

    Raises:
        UsageError: It is neither.
    """
    if isinstance(schedule, str):
        known = schedule in SCHEDULES
    else:
        # By duck typing, because recipes are a Protocol.
        known = callable(getattr(schedule, "fresh", None))
    if not known:
        raise UsageError(
            f"expected schedule to be one of {list(SCHEDULES)}, a Replay or Choices, "
            f"got {schedule!r}"
        )


def build_schedule(
    schedule: str | Recipe, *, seed: int, world_size: int, depth: int = 3
) -> Schedule:
    """Make a schedule for one run.

    Args:
        schedule: `round-robin`, `random`, `pct`, or a recipe.
        seed: Seed of `random` and `pct`.
        world_size: Number of ranks.
        depth: For `pct`; see `Pct`.
    """
    # A recipe; `check_schedule` has refused everything else.
    if not isinstance(schedule, str):
        return schedule.fresh()
    if schedule == "random":
        return RandomSchedule(seed)
    if schedule == "pct":
        picks = PICKS_PER_RANK * world_size
        return Pct(seed, world_size=world_size, depth=depth, picks=picks)
    return RoundRobin()
