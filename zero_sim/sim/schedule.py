"""Schedules: a policy picks the next one of the ranks that can run.

A run is a function of (program, timing, schedule, seed); two runs with equal ones give equal event
logs. A schedule serves one run; what makes a fresh one for each run is a recipe.
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
"""How many picks a run is thought to have for each rank, where `pct` places its changes."""


class Schedule(Protocol):
    """A policy over ready ranks; one instance serves one run."""

    def add(self, rank: int) -> None:
        """Note that `rank` became able to run."""
        ...

    def defer(self, rank: int) -> None:
        """Note that `rank` asked for something that is not done, and will ask again.

        A policy that always preferred it would never let it be done.
        """
        ...

    def pick(self) -> int | None:
        """Remove and return the rank to run next, or None where none can run."""
        ...


class Recipe(Protocol):
    """Makes a schedule for each run."""

    def fresh(self) -> Schedule:
        """A schedule for one run."""
        ...


class RoundRobin:
    """First ready, first served."""

    def __init__(self) -> None:
        self._ready: deque[int] = deque()

    def add(self, rank: int) -> None:
        """Queue the rank behind all that are ready."""
        self._ready.append(rank)

    defer = add

    def pick(self) -> int | None:
        """The rank that has been ready longest."""
        return self._ready.popleft() if self._ready else None


class RandomSchedule:
    """Any ready rank with equal chance, drawn from the seed."""

    def __init__(self, seed: int) -> None:
        self._ready: list[int] = []
        self._random = random.Random(seed)

    def add(self, rank: int) -> None:
        """Make the rank eligible."""
        self._ready.append(rank)

    defer = add

    def pick(self) -> int | None:
        """A uniformly drawn ready rank."""
        if not self._ready:
            return None
        return self._ready.pop(self._random.randrange(len(self._ready)))


class Pct:
    """Probabilistic concurrency testing: the ready rank of highest priority, with few changes.

    Priorities are drawn; at each of `depth - 1` drawn picks the rank that was to run falls below
    all others. A fault that needs `depth` events in one order is then hit with a chance of at least
    `1 / (ranks * picks ** (depth - 1))`, however many picks there are (Burckhardt et al., "A
    randomized scheduler with probabilistic guarantees of finding bugs", 2010).

    Args:
        seed: Seed of the draws.
        world_size: Number of ranks.
        depth: Events that must come in one order for the fault to show, at least 1.
        picks: About how many picks the run will have.
    """

    def __init__(self, seed: int, *, world_size: int, depth: int, picks: int) -> None:
        draws = random.Random(seed)
        self._priority = list(range(depth, depth + world_size))
        draws.shuffle(self._priority)
        changes = draws.sample(range(picks), min(depth - 1, picks))
        self._changes = {position: depth - 1 - i for i, position in enumerate(changes)}
        self._picked = 0
        self._lowest = 0
        self._ready: list[int] = []

    def add(self, rank: int) -> None:
        """Make the rank eligible."""
        self._ready.append(rank)

    def defer(self, rank: int) -> None:
        """Make the rank eligible once no other is."""
        self._lowest -= 1
        self._priority[rank] = self._lowest
        self._ready.append(rank)

    def pick(self) -> int | None:
        """The ready rank of highest priority."""
        if not self._ready:
            return None
        rank = max(self._ready, key=self._priority.__getitem__)
        changed = self._changes.get(self._picked)
        self._picked += 1
        if changed is not None:
            self._priority[rank] = changed
            rank = max(self._ready, key=self._priority.__getitem__)
        self._ready.remove(rank)
        return rank


class Choosing:
    """Takes the choices of `Choices` one by one; keeps how many ranks were ready at each pick."""

    def __init__(self, choices: Sequence[int]) -> None:
        self._choices = choices
        self._ready: list[int] = []
        self.widths: list[int] = []

    def add(self, rank: int) -> None:
        """Queue the rank behind all that are ready."""
        self._ready.append(rank)

    defer = add

    def pick(self) -> int | None:
        """The ready rank that the choice of this pick names."""
        if not self._ready:
            return None
        position = len(self.widths)
        self.widths.append(len(self._ready))
        choice = self._choices[position] if position < len(self._choices) else 0
        return self._ready.pop(choice % len(self._ready))


@dataclass(frozen=True, slots=True)
class Choices:
    """A schedule written down as numbers, the smaller and fewer the plainer.

    Pick number `i` takes the ready rank at index `choices[i]` modulo how many are ready, the one
    ready longest being at 0; picks beyond the list take that one. An empty list is round-robin.
    """

    choices: tuple[int, ...] = ()

    def fresh(self) -> Schedule:
        """A schedule for one run."""
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
        """The rank that the recording has at this turn.

        Raises:
            ScheduleDiverged: It cannot run, or the recording is over; not where the run is to go on
                without the recording.
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
    """A recorded schedule, run again turn by turn.

    Args:
        turns: `EventLog.turns` of the run to repeat.
        strict: Whether a turn that cannot be taken is an error; otherwise the run goes on from
            there, first come first served.
    """

    def __init__(self, turns: Sequence[int], *, strict: bool = True) -> None:
        self.turns = tuple(turns)
        self.strict = strict
        self._latest: Replaying | None = None

    @property
    def diverged_at(self) -> int | None:
        """The first turn of the latest run that differs from the recorded ones, from 0."""
        return None if self._latest is None else self._latest.diverged_at

    def fresh(self) -> Schedule:
        """A schedule for one run."""
        self._latest = Replaying(self.turns, strict=self.strict)
        return self._latest


def check_schedule(schedule: object) -> None:
    """Refuse what is neither the name of a schedule nor a recipe.

    Raises:
        UsageError: It is neither; with the known names.
    """
    if isinstance(schedule, str):
        known = schedule in SCHEDULES
    else:
        known = callable(getattr(schedule, "fresh", None))
    if not known:
        raise UsageError(
            f"expected schedule to be one of {list(SCHEDULES)}, a Replay or Choices, "
            f"got {schedule!r}"
        )


def build_schedule(
    schedule: str | Recipe, *, seed: int, world_size: int, depth: int = 3
) -> Schedule:
    """Make a fresh schedule for one run.

    Args:
        schedule: `round-robin`, `random`, `pct`, or what makes one.
        seed: Seed of the drawn ones.
        world_size: Number of ranks.
        depth: Of `pct`, see `Pct`.
    """
    if not isinstance(schedule, str):
        return schedule.fresh()
    if schedule == "random":
        return RandomSchedule(seed)
    if schedule == "pct":
        picks = PICKS_PER_RANK * world_size
        return Pct(seed, world_size=world_size, depth=depth, picks=picks)
    return RoundRobin()
