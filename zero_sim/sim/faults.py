"""Planned faults, which a world injects.

A plan is a list of `Fault`s. Each names a rank and one of its collectives, given or drawn from the
seed. So a run with faults is reproducible: it is a function of (program, schedule, seed, plan). An
`Injector` counts a run's calls and returns due faults, which `zero_sim.sim.comm.planned_faults`
applies to data. The log has a `FaultRecord` for each fault in the plan.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from zero_sim.errors import UsageError
from zero_sim.host.arguments import check_kind
from zero_sim.sim.call import KINDS, Call
from zero_sim.sim.log import EventLog, FaultRecord
from zero_sim.sim.schedule import Schedule

FaultKind = Literal["crash", "stall", "corrupt", "drop", "duplicate", "slow"]
_CHOICES = {
    "kind": get_args(FaultKind),
    "at": ("call", "random"),
    "side": ("send", "receive"),
}

PASSED_OVER_MAX = 100
"""Limit on another rank's turns before a slow rank gets a turn: the other may be polling for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A planned fault on one rank.

    `crash`: the rank raises `InjectedCrash` instead of calling. `stall`: the rank never reaches the
    call. `corrupt`: a bit of an element that the rank sends or receives is flipped. `drop`: the
    rank's data is lost, so a reduction omits it and other collectives deliver zeros. `duplicate`:
    the rank's data counts twice in a reduction, and in a gather also replaces the next rank's.
    `slow`: during the whole run, the rank only gets the baton if no other rank can run.

    A fault on the sending side does not change the rank's own memory, except where the collective
    writes.
    """

    kind: FaultKind
    rank: int
    call: int = 0
    """Index among the rank's collectives, from 0. With `at = "random"`, the lowest index that may
    be drawn. Not for `slow`."""
    at: Literal["call", "random"] = "call"
    """`call`: at index `call`. `random`: drawn from the world's seed."""
    call_stop: int | None = None
    """Exclusive end of the drawn range of indices, with `at = "random"`."""
    collective: str | None = None
    """Kind of the calls that count, as named in the log; None for all kinds."""
    side: Literal["send", "receive"] = "send"
    """`corrupt`: change the rank's contribution (`send`) or its result (`receive`)."""
    element: int | None = None
    """`corrupt`: index into the elements of all the call's tensors; None to draw."""
    bit: int | None = None
    """`corrupt`: index of the bit, 0 for the least significant bit; None to draw."""


class InjectedCrash(BaseException):
    """A planned crash of a rank. Not an Exception, so that programs do not catch it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DueFault:
    """A fault, with the call at which it is due."""

    fault: Fault
    index: int
    """Position in the plan."""
    when: str
    """Description of the call: `at its 7th call (call = 6, all_reduce #2 of group world)`."""
    file: str
    line: int
    """Call site."""
    random: random.Random
    note: Callable[[FaultRecord], None]

    def fired(self, effect: str) -> None:
        """Record that the fault happened."""
        self._note(effect, fired=True)

    def missed(self, reason: str) -> None:
        """Record why the fault could not happen at the due call."""
        self._note(reason, fired=False)

    def _note(self, effect: str, *, fired: bool) -> None:
        fault = self.fault
        record = FaultRecord(
            self.index, fault.kind, fault.rank, fired, self.when, effect, self.file, self.line
        )
        self.note(record)


class StalledByPlan:
    """A stalled rank's wait, which never ends."""

    def __init__(self, when: str) -> None:
        self.done = False
        self.waiters: list[int] = []
        self.missing: tuple[int, ...] = ()
        self.doing = f"stalled by plan {when}"


def check_faults(faults: Sequence[Fault], *, world_size: int) -> None:
    """Raise UsageError if a fault's field has a wrong type or value."""
    for index, fault in enumerate(faults):
        if not isinstance(fault, Fault):
            raise UsageError(f"expected fault {index} to be a zero_sim.sim.Fault, got {fault!r}")
        # A scenario file can contain any type, and the comparisons below need integers.
        for name in ("rank", "call", "call_stop", "element", "bit"):
            number = getattr(fault, name)
            if name in ("rank", "call") or number is not None:
                check_kind(f"{name} of fault {index}", number, "an integer")
        for name, known in _CHOICES.items():
            if getattr(fault, name) not in known:
                _refuse(index, name, f"one of {', '.join(known)}", getattr(fault, name))
        if not 0 <= fault.rank < world_size:
            _refuse(index, "rank", f"at least 0 and less than {world_size}", fault.rank)
        if fault.collective is not None and fault.collective not in KINDS:
            _refuse(index, "collective", f"one of {', '.join(KINDS)}", fault.collective)
        for name in ("call", "element", "bit"):
            number = getattr(fault, name)
            if number is not None and number < 0:
                _refuse(index, name, "at least 0", number)
        # An empty range has nothing to draw from.
        stop = fault.call_stop
        if fault.at == "random" and (stop is None or stop <= fault.call):
            _refuse(index, "call_stop", f"more than call = {fault.call}", stop)


def _refuse(index: int, name: str, expected: str, got: object) -> None:
    raise UsageError(f"expected {name} of fault {index} to be {expected}, got {got!r}")


class Injector:
    """Carries out a plan in a run. The log receives a record for each fault."""

    def __init__(self, faults: Sequence[Fault], *, seed: int, log: EventLog) -> None:
        self.faults = tuple(faults)
        self._log = log
        # A generator per fault, because its draws must not depend on other faults.
        self._random = [random.Random(f"{seed}/{index}") for index in range(len(faults))]
        self._calls = [
            fault.call
            if fault.at == "call" or fault.call_stop is None
            else drawn.randrange(fault.call, fault.call_stop)
            for fault, drawn in zip(self.faults, self._random, strict=True)
        ]
        self._counts: Counter[tuple[int, str | None]] = Counter()
        self._noted: set[int] = set()

    def due(self, rank: int, call: Call, *, what: str) -> tuple[DueFault, ...]:
        """Count a rank's next call, and return due faults.

        `what` is the collective, such as `all_reduce #2 of group world`.
        """
        if not self.faults:
            return ()
        due_faults = []
        for index, fault in enumerate(self.faults):
            if fault.rank != rank or fault.kind == "slow":
                continue
            if fault.collective not in (None, call.kind):
                continue
            # The number of earlier calls is this call's index.
            if self._counts[rank, fault.collective] == self._calls[index]:
                number = self._calls[index]
                of = f" {fault.collective}" if fault.collective else ""
                due = DueFault(
                    fault=fault,
                    index=index,
                    when=f"at its {_ordinal(number + 1)}{of} call (call = {number}, {what})",
                    file=call.file,
                    line=call.line,
                    random=self._random[index],
                    note=self._note,
                )
                due_faults.append(due)
        # A fault may count all calls, or only calls of a kind.
        self._counts[rank, None] += 1
        self._counts[rank, call.kind] += 1
        return tuple(due_faults)

    def slow_down(self, schedule: Schedule) -> Schedule:
        """Wrap the schedule, to run slow ranks last."""
        # If a rank has several `slow` faults, the last gets the record.
        slow = {
            fault.rank: index for index, fault in enumerate(self.faults) if fault.kind == "slow"
        }
        if not slow:
            return schedule
        return SlowedSchedule(schedule, slow=slow, passed_over=self._note_slow)

    def close(self) -> None:
        """Record why the other faults did not happen. Called once, after the run."""
        for index, fault in enumerate(self.faults):
            if index in self._noted:
                continue
            # A slow rank without competitors is never passed over.
            reason = "no other rank was ever ready at the same time"
            if fault.kind != "slow":
                made, number = self._counts[fault.rank, fault.collective], self._calls[index]
                reason = (
                    f"the rank made {made} {fault.collective or 'collective'} "
                    f"call{'' if made == 1 else 's'}, and it was planned for its "
                    f"{_ordinal(number + 1)} (call = {number})"
                )
            self._note(FaultRecord(index, fault.kind, fault.rank, False, "", reason, "", 0))

    def _note_slow(self, index: int) -> None:
        if index not in self._noted:
            effect = "it got the baton only where no other rank could run"
            rank = self.faults[index].rank
            self._note(FaultRecord(index, "slow", rank, True, "", effect, "", 0))

    def _note(self, record: FaultRecord) -> None:
        self._noted.add(record.index)
        self._log.faults.append(record)


class SlowedSchedule:
    """A schedule that only picks slow ranks if no other rank is ready.

    Args:
        inner: The schedule for all other ranks.
        slow: Fault's index in the plan, by slow rank.
        passed_over: Called with this index if the slow rank was ready and another was picked.
    """

    def __init__(
        self, inner: Schedule, *, slow: dict[int, int], passed_over: Callable[[int], None]
    ) -> None:
        self._inner = inner
        self._slow = slow
        self._passed_over = passed_over
        self._ready: deque[int] = deque()
        # Number of picks since a slow rank last ran, by picked rank.
        self._picks: Counter[int] = Counter()

    def add(self, rank: int) -> None:
        """Note that `rank` can run."""
        if rank in self._slow:
            self._ready.append(rank)
        else:
            self._inner.add(rank)

    def defer(self, rank: int) -> None:
        """Note that `rank` can run, but should run after the others."""
        if rank in self._slow:
            self._ready.append(rank)
        else:
            self._inner.defer(rank)

    def pick(self) -> int | None:
        """Remove and return the rank to run next, a slow rank only if no other is ready."""
        if not self._ready:
            return self._inner.pick()
        # Check before the pick, because a picked rank cannot return to its place in the inner
        # schedule.
        starved = max(self._picks.values(), default=0) >= PASSED_OVER_MAX
        chosen = None if starved else self._inner.pick()
        if chosen is None:
            self._picks.clear()
            return self._ready.popleft()
        self._picks[chosen] += 1
        for rank in self._ready:
            self._passed_over(self._slow[rank])
        return chosen


def _ordinal(number: int) -> str:
    # 1st, 2nd, 3rd, 21st, but 11th to 13th.
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ending}"
