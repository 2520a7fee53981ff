"""Who runs next: a policy picks one of the ranks that can run.

A run is a function of (program, schedule, seed); two runs with equal ones give equal event logs.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Protocol


class Schedule(Protocol):
    """A policy over ready ranks; one instance serves one run."""

    def add(self, rank: int) -> None:
        """Note that `rank` became able to run."""
        ...

    def pick(self) -> int | None:
        """Remove and return the rank to run next, or None where none can run."""
        ...


class RoundRobin:
    """First ready, first served."""

    def __init__(self) -> None:
        self._ready: deque[int] = deque()

    def add(self, rank: int) -> None:
        """Queue the rank behind all that are ready."""
        self._ready.append(rank)

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

    def pick(self) -> int | None:
        """A uniformly drawn ready rank."""
        if not self._ready:
            return None
        return self._ready.pop(self._random.randrange(len(self._ready)))


class Replay:
    """The turns of an earlier run; from the first that cannot be taken on, first come first served.

    Args:
        turns: The ranks that got the baton, in order, as `EventLog.turns` has them.
    """

    def __init__(self, turns: Sequence[int]) -> None:
        self.turns = tuple(turns)
        self.diverged_at: int | None = None
        """The first turn that differs from the recorded ones, counted from 0."""
        self._taken = 0
        self._ready: deque[int] = deque()

    def add(self, rank: int) -> None:
        """Queue the rank behind all that are ready."""
        self._ready.append(rank)

    def pick(self) -> int | None:
        """The rank of the recorded turn, or the one that has been ready longest."""
        if not self._ready:
            return None
        turn, self._taken = self._taken, self._taken + 1
        if self.diverged_at is None:
            if turn < len(self.turns) and self.turns[turn] in self._ready:
                self._ready.remove(self.turns[turn])
                return self.turns[turn]
            self.diverged_at = turn
        return self._ready.popleft()


def build_schedule(name: str, *, seed: int) -> Schedule:
    """Make a fresh schedule for one run.

    Args:
        name: `round-robin` or `random`.
        seed: Seed of the random one.
    """
    return RandomSchedule(seed) if name == "random" else RoundRobin()


SCHEDULES = ("round-robin", "random")
