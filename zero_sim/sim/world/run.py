"""State of one run of a program on a world."""

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
        """Ranks whose time currently does not count against `stall_seconds`."""
        self.blocks: Counter[int] = Counter()
        """Open harness blocks by rank, nested ones included. Inside of any, the rank's calls are
        the harness's."""
        self.changes = 0


class PausedClock:
    """A block that does not count as the program's time, or inside of such a block, counts again.

    Args:
        time: Program time of the run.
        rank: World rank.
        pause: False to count the time again.
        watched: False if the race detector ignores the block.
        on_error: Called with an exception that leaves the block; may raise another one.
    """

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
        # One shared nullcontext for all watched blocks.
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
        # Counts as progress for the watch over stalled ranks.
        self._time.changes += 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Run:
    """One program, running or ended."""

    baton: Baton
    log: EventLog
    injector: Injector
    timing: Timing
    buffers: list[InFlightBuffers]
    """Each rank's buffers in flight, by rank."""
    races: bool
    program_time: ProgramTime = field(default_factory=ProgramTime)
    group_registry: GroupRegistry = field(default_factory=GroupRegistry)
    _refused: list[tuple[int, UsageError]] = field(default_factory=list)

    def refuse(self, rank: int, error: UsageError) -> None:
        """Note an error of a thread that a rank started, because the program may ignore it.

        Args:
            rank: World rank that started the thread.
            error: The error raised in the thread.
        """
        self._refused.append((rank, error))

    def check_threads(self) -> None:
        """Fail if a rank's thread was refused a call that a real process would have accepted."""
        if self.baton.failure is None and self._refused:
            rank, error = self._refused[0]
            hide_simulator(error)
            self.fail(RankFailed(rank, error, "".join(traceback.format_exception(error))))

    def fail(self, failure: WorldFailure) -> WorldFailure:
        """End the world. A contract violation gets the last calls of its ranks."""
        if isinstance(failure, ContractViolation):
            # Once each, if both ranks are the same.
            failure.history = self.log.history(
                tuple(dict.fromkeys((failure.other_rank, failure.rank)))
            )
        return self.baton.fail(failure)

    def check_ended(self, *, group_count: int) -> None:
        """Check for violations that only show after all ranks have returned.

        Args:
            group_count: Number of groups of the run.
        """
        if self.baton.failure is not None:
            return
        failure = None
        # A missing wait first: it often explains an order, too.
        if self.log.unwaited:
            failure = never_waited([self.log.collectives[i] for i in sorted(self.log.unwaited)])
        # One group alone has one order, which each collective has checked.
        elif group_count > 1:
            failure = inversion_error(self.log.collectives)
        if failure is not None:
            self.fail(failure)
