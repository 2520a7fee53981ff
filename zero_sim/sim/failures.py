"""Failures that end a run of the simulated world, each naming the culprit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from zero_sim.errors import UsageError, ZeroSimError
from zero_sim.sim.callsite import site_of
from zero_sim.sim.in_flight_buffers import InFlightBuffer


class WorldFailure(ZeroSimError):
    """The program that ran on the world did something wrong; root of the classes below."""


class RankFailed(WorldFailure):
    """A rank raised; the world ended.

    Args:
        rank: World rank.
        error: Exception of the rank; also the `__cause__`, in a copy from another process too.
        traceback_text: Traceback of `error` as text.
    """

    def __init__(self, rank: int, error: BaseException, traceback_text: str) -> None:
        self.rank = rank
        self.error = error
        self.traceback_text = traceback_text
        super().__init__(f"rank {rank} raised {type(error).__name__}: {error}")
        self.__cause__ = error

    def __setstate__(self, state: dict[str, Any] | None) -> None:
        super().__setstate__(state)
        self.__cause__ = self.error

    @property
    def report(self) -> str:
        """The message and the traceback of the rank."""
        return f"{self}\n{self.traceback_text.rstrip()}"


class BadArgument(UsageError, RuntimeError):
    """One rank called a collective with arguments that gloo refuses by themselves.

    It is raised in that rank alone and ends nothing: as with gloo, a program may catch it.

    Args:
        kind: The method that was called.
        complaint: What is wrong, in gloo's words.
        hint: What was expected, and what to try.
    """

    def __init__(self, kind: str, complaint: str, hint: str) -> None:
        self.kind = kind
        super().__init__(f"{kind}: {complaint}. {hint}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStatus:
    """What one rank was doing when no rank could run."""

    rank: int
    doing: str
    """`returned`, or what it waits for."""
    site: str
    """Where it was called, `file:line`; empty for a rank that returned."""
    missing: tuple[int, ...]
    """Ranks that have not come to what it waits for."""
    recent: tuple[str, ...] = ()
    """Its last calls in words, the oldest first."""


class Deadlock(WorldFailure):
    """No rank can run and not all have returned; carries who waits for what.

    Args:
        statuses: What each rank was doing, in rank order.
        cycle: Ranks that wait for each other in a circle, or that issued collectives of several
            groups in different orders, in words; empty where there are none.
    """

    def __init__(self, statuses: tuple[RankStatus, ...], *, cycle: tuple[str, ...] = ()) -> None:
        self.statuses = statuses
        self.cycle = cycle
        waiting = [status for status in statuses if status.missing or status.site]
        # Ranks that wait for one thing share one tuple; at 1,024 ranks that matters.
        distinct = {id(status.missing): status.missing for status in waiting}.values()
        absent = sorted({rank for missing in distinct for rank in missing})
        names = ", ".join(map(str, absent)) or "none"
        head = (
            f"deadlock: {len(waiting)} of {len(statuses)} ranks wait and none can run; "
            f"ranks that never came: {names}"
        )
        super().__init__("\n".join([head, *cycle, *_table(statuses)]))


class TimedOut(ZeroSimError, RuntimeError):
    """A rank's time-out was over: no rank could run any more.

    It is raised in that rank alone, which may catch it, as with gloo. Where the rank does not, the
    run ends with the deadlock.

    Args:
        doing: What the rank waited for.
        missing: World ranks that have not come to it.
        deadlock: What each rank was doing.
        seconds: How long the time-out was, in simulated time.
        message: What it says, if not that the wait timed out.
    """

    def __init__(
        self,
        doing: str,
        missing: tuple[int, ...],
        deadlock: Deadlock,
        *,
        seconds: float,
        message: str = "",
    ) -> None:
        self.doing = doing
        self.missing = missing
        self.deadlock = deadlock
        self.seconds = seconds
        absent = ", ".join(map(str, missing)) or "none"
        super().__init__(
            message or f"[{doing}] Timed out waiting {seconds * 1000:g}ms; not there: {absent}"
        )

    def saying(self, message: str) -> Self:
        """The same in other words."""
        return type(self)(
            self.doing, self.missing, self.deadlock, seconds=self.seconds, message=message
        )


def _table(statuses: tuple[RankStatus, ...]) -> list[str]:
    """One line a rank; equal neighbours are folded so that 1,024 ranks stay readable."""
    lines: list[str] = []
    start = 0
    for stop in range(1, len(statuses) + 1):
        first = statuses[start]
        if stop < len(statuses) and _same(first, statuses[stop]):
            continue
        last = stop - 1
        who = f"rank {start}" if start == last else f"ranks {start}-{last}"
        place = f" at {first.site}" if first.site else ""
        shown = ", ".join(map(str, first.missing[:16])) + (", ..." if first.missing[16:] else "")
        absent = f"; not there: {shown}" if first.missing else ""
        lines.append(f"  {who}: {first.doing}{place}{absent}")
        lines.extend(f"      after {call}" for call in first.recent)
        start = stop
    return lines


def _same(a: RankStatus, b: RankStatus) -> bool:
    same_missing = a.missing is b.missing or a.missing == b.missing
    return same_missing and (a.doing, a.site, a.recent) == (b.doing, b.site, b.recent)


class ContractViolation(WorldFailure):
    """Calls that NCCL would refuse, hang on or misread; carries the call sites in its message.

    Args:
        message: What was expected, what came, and where.
        aspect: What is wrong, as a short name that stays: `dtype`, `root`, `swapped-buffers`, ...
        rank: World rank whose call showed it.
        other_rank: World rank whose call it does not fit; `rank` again where it is wrong by itself.
    """

    def __init__(self, message: str, *, aspect: str, rank: int, other_rank: int) -> None:
        self.aspect = aspect
        self.rank = rank
        self.other_rank = other_rank
        self.history: tuple[str, ...] = ()
        super().__init__(message)

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *self.history])


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """One tensor operation of the program that touched memory in flight."""

    operation: str
    """As torch's dispatcher names it, `aten::add_`."""
    node: str
    """The autograd node that ran it, or that a hook belongs to; empty outside of backward."""
    writes: bool
    file: str
    line: int
    """The innermost frame of the program."""
    start: int
    stop: int
    """Half-open range from the first to the last element of the collective's tensor that it
    touched, in row-major order."""

    @property
    def site(self) -> str:
        """Where it was, `file:line`."""
        return site_of(self.file, self.line)


class DataRace(WorldFailure):
    """A rank used memory that it had lent to an operation and not waited for; carries both."""

    def __init__(self, rank: int, *, access: Access, buffer: InFlightBuffer) -> None:
        self.rank = rank
        self.access = access
        self.buffer = buffer
        tensor = buffer.tensor if buffer.whole is None else buffer.whole
        place = f" in backward of {access.node}" if access.node else ""
        does, busy = (
            ("writes", "still read") if buffer.role == "input" else ("uses", "still written")
        )
        verb = "writes" if access.writes else "reads"
        super().__init__(
            f"data race on rank {rank}: {access.operation} at {access.site}{place} {verb} elements "
            f"[{access.start}, {access.stop}) of the {buffer.role} of {buffer.what}, which is in "
            f"flight\n"
            f"  issued at {buffer.site} and not waited for\n"
            f"  {buffer.role}: shape {tuple(tensor.shape)}, {tensor.dtype}, {busy} until then\n"
            f"Try wait() on what it returned before this line {does} the tensor, or another tensor."
        )


class RankStalled(WorldFailure):
    """A rank held the baton for too long without reaching torch.distributed."""

    def __init__(self, rank: int, seconds: float, stack: str) -> None:
        self.rank = rank
        super().__init__(
            f"rank {rank} ran for more than {seconds:g} s without calling torch.distributed, so no "
            f"other rank could run. It was here:\n{stack.rstrip()}\n"
            "Try a larger stall_seconds if the rank was only computing."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LentMemory:
    """Memory that a program has lent to an operation."""

    operation: str
    """The operation in flight, as in `all_gather #3 of group world`."""
    site: str
    """Where it was issued, `file:line`."""
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Changed:
    """Elements of lent memory that changed."""

    index: int
    """The first of them, in the tensor's own order."""
    count: int
    old_bits: int
    """Bits of the first of them before, as an unsigned number."""
    new_bits: int
    """Its bits now."""


class InFlightRace(WorldFailure):
    """A program touched memory that it had lent to an operation it had not waited for.

    Args:
        what: What happened to which memory, as in `input of all_gather #3 of group world changed
            between issue and wait`.
        rank: World rank whose memory it is.
        memory: The memory.
        detail: What is there and what was expected; a line of its own.
        hint: What to try.
        changed: The elements that changed; None if the memory as a whole is gone or lent twice.
    """

    def __init__(
        self,
        what: str,
        *,
        rank: int,
        memory: LentMemory,
        detail: str,
        hint: str,
        changed: Changed | None = None,
    ) -> None:
        self.rank = rank
        self.memory = memory
        self.changed = changed
        site = memory.site or "(unknown)"
        super().__init__(
            f"rank {rank}: {what}\n"
            f"  issued at {site}; {memory.dtype} of shape {memory.shape}\n"
            f"  {detail}\n"
            f"{hint}"
        )


class ScheduleDiverged(WorldFailure, UsageError):
    """A recorded schedule does not fit the run; carries the turn at which it first did not."""

    exit_status = UsageError.exit_status

    def __init__(self, message: str, *, position: int) -> None:
        self.position = position
        super().__init__(message)


class RankEnded(BaseException):
    """Unwinds a rank whose world has ended; not an Exception, so that programs do not catch it."""
