"""Time that counts as a program's, and time that a harness takes in a rank's turn."""

from __future__ import annotations

from collections import Counter


class ProgramTime:
    """Blocks of a harness that are open in each rank."""

    def __init__(self) -> None:
        self.paused: set[int] = set()
        """Ranks whose time does not count against `stall_seconds` at present."""
        self.blocks: Counter[int] = Counter()
        """By rank: open blocks of a harness, those within one included."""
        self.changes = 0

    def is_in_harness(self, rank: int) -> bool:
        """True if a harness, not its program, makes the rank's calls at present."""
        return self.blocks[rank] > 0


class PausedClock:
    """A block in which a rank's time is not its program's; or, in such a block, is again.

    Args:
        time: Of the run.
        rank: World rank.
        pause: False if its time counts again.
    """

    __slots__ = ("_before", "_pause", "_rank", "_time")

    def __init__(self, time: ProgramTime, *, rank: int, pause: bool) -> None:
        self._time = time
        self._rank = rank
        self._pause = pause

    def __enter__(self) -> None:
        self._before = self._rank in self._time.paused
        self._set(self._pause)
        self._time.blocks[self._rank] += self._pause

    def __exit__(self, *exception: object) -> None:
        self._time.blocks[self._rank] -= self._pause
        self._set(self._before)

    def _set(self, paused: bool) -> None:
        (self._time.paused.add if paused else self._time.paused.discard)(self._rank)
        self._time.changes += 1
