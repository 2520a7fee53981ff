"""State of a program's run on a world."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType

from zero_sim.errors import UsageError
from zero_sim.sim.callsite import hide_simulator
from zero_sim.sim.contract.groups import GroupRegistry
from zero_sim.sim.contract.inversions import inversion_error, never_waited
from zero_sim.sim.failures import ContractViolation, RankFailed, WorldFailure
from zero_sim.sim.faults import Injector
from zero_sim.sim.in_flight_buffers import InFlightBuffers
from zero_sim.sim.inflight.races import unwatched
from zero_sim.sim.inflight.timing import Timing
from zero_sim.sim.log import EventLog
from zero_sim.sim.world.baton import Baton

_WATCHED: AbstractContextManager[object] = nullcontext()


class ProgramTime:
    """Open harness blocks of each rank."""

    def __init__(self) -> None:
        self.paused: set[int] = set()
        """Ranks whose time does not count against `stall_seconds` now."""
        self.blocks: Counter[int] = Counter()
        """Number of open blocks by rank. While it is not 0, the rank's calls are the harness's."""
        self.changes = 0


class PausedClock:
    """Context manager for a block of harness code; see `World.pause_clock`."""

    # A class instead of a generator, because a small case has hundreds of these blocks.
    __slots__ = ("_before", "_on_error", "_pause", "_rank", "_time", "_watch")

    def __init__(
        self,
        time: ProgramTime,
        *,
        rank: int,
        pause: bool,
        watched: bool,
        on_error: Callable[[BaseException], None] | None,
    ) -> None:
        self._time = time
        self._rank = rank
        self._pause = pause
        # All watched blocks share one nullcontext.
        self._watch = _WATCHED if watched else unwatched()
        self._on_error = on_error

    def __enter__(self) -> None:
        # Blocks nest, so the exit restores this.
        self._before = self._rank in self._time.paused
        self._set(self._pause)
        self._time.blocks[self._rank] += self._pause
        self._watch.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # In reverse order of `__enter__`.
        self._watch.__exit__(kind, error, trace)
        self._time.blocks[self._rank] -= self._pause
        self._set(self._before)
        if error is not None and self._on_error is not None:
            self._on_error(error)

    def _set(self, paused: bool) -> None:
        (self._time.paused.add if paused else self._time.paused.discard)(self._rank)
        # `World` counts a change as progress, so the rank is not stalled.
        self._time.changes += 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Run:
    """A program's run, current or ended."""

    baton: Baton
    log: EventLog
    injector: Injector
    timing: Timing
    buffers: list[InFlightBuffers]
    """Indexed by rank."""
    races: bool
    program_time: ProgramTime = field(default_factory=ProgramTime)
    group_registry: GroupRegistry = field(default_factory=GroupRegistry)
    _refused: list[tuple[int, UsageError]] = field(default_factory=list)

    def refuse(self, rank: int, error: UsageError) -> None:
        """Note an error in a thread that `rank` started, because the program may ignore it."""
        self._refused.append((rank, error))

    def check_threads(self) -> None:
        """Fail if a call in a rank's helper thread was refused. A real process would accept it."""
        if self.baton.failure is None and self._refused:
            rank, error = self._refused[0]
            hide_simulator(error)
            self.fail(RankFailed(rank, error, "".join(traceback.format_exception(error))))

    def fail(self, failure: WorldFailure) -> WorldFailure:
        """End the world. Add the ranks' last calls to a contract violation."""
        if isinstance(failure, ContractViolation):
            # Both ranks may be the same.
            failure.history = self.log.history(
                tuple(dict.fromkeys((failure.other_rank, failure.rank)))
            )
        return self.baton.fail(failure)

    def check_ended(self, *, group_count: int) -> None:
        """Check for violations that only show after all ranks have returned."""
        if self.baton.failure is not None:
            return
        failure = None
        # Missing waits first, because they often explain a wrong order too.
        if self.log.unwaited:
            failure = never_waited([self.log.collectives[i] for i in sorted(self.log.unwaited)])
        # In a single group, each collective has already checked the order.
        elif group_count > 1:
            failure = inversion_error(self.log.collectives)
        if failure is not None:
            self.fail(failure)
