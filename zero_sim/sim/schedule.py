"""Schedules, which pick the next rank among the ready ranks.

A run is a function of (program, timing, schedule, seed): runs with equal inputs have equal event
logs. A schedule serves a single run. A recipe makes a fresh schedule for each run.
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
"""Expected number of picks per rank in a run, over which `pct` spreads its priority changes."""


class Schedule(Protocol):
    """Picks ready ranks in a single run."""

    def add(self, rank: int) -> None:
        """Note that `rank` can run."""
        ...

    def defer(self, rank: int) -> None:
        """Note that `rank` can run, but is polling for other ranks' work.

        A policy must not always prefer such a rank, or the others would never finish their work.
        """
        ...

    def pick(self) -> int | None:
        """Remove and return the rank to run next; None if no rank is ready."""
        ...


class Recipe(Protocol):
    """Makes a schedule for each run."""

    def fresh(self) -> Schedule:
        """Return a schedule for the next run."""
        ...


class RoundRobin:
    """First ready, first served."""

    def __init__(self) -> None:
        self._ready: deque[int] = deque()

    def add(self, rank: int) -> None:
        """Queue the rank after all ready ranks."""
        self._ready.append(rank)

    defer = add

    def pick(self) -> int | None:
        """Return the rank that has been ready longest."""
        return self._ready.popleft() if self._ready else None


class RandomSchedule:
    """Uniform choice among ready ranks, drawn from the seed."""

    def __init__(self, seed: int) -> None:
        # A list, because a set's order is not reproducible.
        self._ready: list[int] = []
        self._random = random.Random(seed)

    def add(self, rank: int) -> None:
        """Make the rank eligible."""
        self._ready.append(rank)

    defer = add

    def pick(self) -> int | None:
        """Return a drawn ready rank."""
        if not self._ready:
            return None
        return self._ready.pop(self._random.randrange(len(self._ready)))


class Pct:
    """Probabilistic concurrency testing: picks the ready rank with the highest priority.

    Priorities are drawn. At each of `depth - 1` drawn picks, the rank about to run drops below all
    others. If a bug needs `depth` events in a certain order, a run finds it with a probability of
    at least `1 / (ranks * picks ** (depth - 1))` (Burckhardt et al., "A randomized scheduler with
    probabilistic guarantees of finding bugs", 2010).

    `picks` is the expected number of picks in the run.
    """

    def __init__(self, seed: int, *, world_size: int, depth: int, picks: int) -> None:
        draws = random.Random(seed)
        # As in the paper, initial priorities start at `depth` and drops use the values below.
        self._priority = list(range(depth, depth + world_size))
        draws.shuffle(self._priority)
        changes = draws.sample(range(picks), min(depth - 1, picks))
        self._changes = {position: depth - 1 - i for i, position in enumerate(changes)}
        self._picked = 0
        # Deferred ranks get priorities below 0, each lower than the last.
        self._lowest = 0
        self._ready: list[int] = []

    def add(self, rank: int) -> None:
        """Make the rank eligible."""
        self._ready.append(rank)

    def defer(self, rank: int) -> None:
        """Make the rank eligible, with the lowest priority."""
        self._lowest -= 1
        self._priority[rank] = self._lowest
        self._ready.append(rank)

    def pick(self) -> int | None:
        """Return the ready rank with the highest priority."""
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
    """The schedule of a `Choices`, which also records the number of ready ranks at each pick."""

    def __init__(self, choices: Sequence[int]) -> None:
        self._choices = choices
        self._ready: list[int] = []
        # Shrinking and exhaustive search derive other choices from the widths.
        self.widths: list[int] = []

    def add(self, rank: int) -> None:
        """Queue the rank after all ready ranks."""
        self._ready.append(rank)

    defer = add

    def pick(self) -> int | None:
        """Return the ready rank that the next number selects."""
        if not self._ready:
            return None
        position = len(self.widths)
        self.widths.append(len(self._ready))
        # After the end of the list, pick the rank that has been ready longest.
        choice = self._choices[position] if position < len(self._choices) else 0
        return self._ready.pop(choice % len(self._ready))


@dataclass(frozen=True, slots=True)
class Choices:
    """A schedule as a list of numbers. For shrinking, short lists of small numbers are simple.

    Pick number `i` takes the ready rank at index `choices[i]`, modulo the number of ready ranks.
    Index 0 is the rank that has been ready longest. Picks after the end of the list use index 0, so
    an empty list is round-robin.
    """

    choices: tuple[int, ...] = ()

    def fresh(self) -> Schedule:
        """Return a schedule for the next run."""
        return Choosing(self.choices)


class Replaying:
    """The schedule of a `Replay`."""

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
        """Return the recorded rank.

        Raises:
            ScheduleDiverged: With `strict`, this rank cannot run, or the recording is over.
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
        # After a divergence, ignore the rest of the recording: first come, first served.
        if self.diverged_at is None:
            self.diverged_at = position
        return self._ready.pop(0)


def _diverged(position: int, expected: str, ready: list[int]) -> ScheduleDiverged:
    return ScheduleDiverged(
        f"the run diverged from its recording: expected {expected}, but the ranks that can run "
        f"there are {ready}. Replay with the recorded program, world size, timing and seed.",
        position=position,
    )


class Replay:
    """A recorded schedule, repeated turn by turn.

    Args:
        turns: `EventLog.turns` of the recorded run.
        strict: True to raise if the recorded rank cannot run. If False, the rest of the run is
            first come, first served.
    """

    def __init__(self, turns: Sequence[int], *, strict: bool = True) -> None:
        self.turns = tuple(turns)
        self.strict = strict
        # The latest run's schedule, for `diverged_at`.
        self._latest: Replaying | None = None

    @property
    def diverged_at(self) -> int | None:
        """First turn of the latest run that differs from the recording, from 0; None if none."""
        return None if self._latest is None else self._latest.diverged_at

    def fresh(self) -> Schedule:
        """Return a schedule for the next run."""
        self._latest = Replaying(self.turns, strict=self.strict)
        return self._latest


def check_schedule(schedule: object) -> None:
    """Raise UsageError if a schedule is neither a known name nor a recipe."""
    if isinstance(schedule, str):
        known = schedule in SCHEDULES
    else:
        # Duck typing, because recipes are a Protocol.
        known = callable(getattr(schedule, "fresh", None))
    if not known:
        raise UsageError(
            f"expected schedule to be one of {list(SCHEDULES)}, a Replay or Choices, "
            f"got {schedule!r}"
        )


def build_schedule(
    schedule: str | Recipe, *, seed: int, world_size: int, depth: int = 3
) -> Schedule:
    """Make a schedule for a run.

    `schedule` is `round-robin`, `random`, `pct`, or a recipe. `seed` is for `random` and `pct`,
    `depth` for `pct`.
    """
    # `check_schedule` has refused everything else.
    if not isinstance(schedule, str):
        return schedule.fresh()
    if schedule == "random":
        return RandomSchedule(seed)
    if schedule == "pct":
        picks = PICKS_PER_RANK * world_size
        return Pct(seed, world_size=world_size, depth=depth, picks=picks)
    return RoundRobin()
