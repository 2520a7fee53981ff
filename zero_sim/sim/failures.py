"""Failures that end a run of the simulated world."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from zero_sim.errors import UsageError, ZeroSimError
from zero_sim.sim.callsite import site_of
from zero_sim.sim.in_flight_buffers import InFlightBuffer


class WorldFailure(ZeroSimError):
    """An error in the program that ran on the world. Base of the failures below."""


class RankFailed(WorldFailure):
    """An exception on a rank, which ended the world.

    Args:
        rank: World rank.
        error: The exception. Also the `__cause__`, even in a copy from another process.
        traceback_text: Traceback of `error`.
    """

    def __init__(self, rank: int, error: BaseException, traceback_text: str) -> None:
        self.rank = rank
        self.error = error
        self.traceback_text = traceback_text
        super().__init__(f"rank {rank} raised {type(error).__name__}: {error}")
        # Then Python prints the rank's traceback before ours.
        self.__cause__ = error

    def __setstate__(self, state: dict[str, Any] | None) -> None:
        # Pickling drops `__cause__`.
        super().__setstate__(state)
        self.__cause__ = self.error

    @property
    def report(self) -> str:
        """The message and the rank's traceback."""
        return f"{self}\n{self.traceback_text.rstrip()}"


class BadArgument(UsageError, RuntimeError):
    """A call that gloo refuses for its arguments alone, without other ranks.

    Raised in the calling rank only. The world goes on: as with gloo, a program may catch it.

    Args:
        kind: The called method.
        complaint: gloo's message.
        hint: The expected arguments and a remedy.
    """

    def __init__(self, kind: str, complaint: str, hint: str) -> None:
        self.kind = kind
        super().__init__(f"{kind}: {complaint}. {hint}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStatus:
    """A rank's state at the moment when no rank could run."""

    rank: int
    doing: str
    """`returned`, or the awaited operation."""
    site: str
    """Call site of the wait, `file:line`; empty for a rank that returned."""
    missing: tuple[int, ...]
    """World ranks for which the rank waits."""
    recent: tuple[str, ...] = ()
    """Descriptions of the rank's last calls, oldest first."""


class Deadlock(WorldFailure):
    """No rank can run, and not all have returned.

    Args:
        statuses: State of each rank, in rank order.
        cycle: Lines about ranks that wait for each other in a circle, or that issued collectives of
            several groups in different orders. Empty if neither was found.
    """

    def __init__(self, statuses: tuple[RankStatus, ...], *, cycle: tuple[str, ...] = ()) -> None:
        self.statuses = statuses
        self.cycle = cycle
        waiting = [status for status in statuses if status.missing or status.site]
        # By id, because 1,024 ranks that share a wait also share the tuple.
        distinct = {id(status.missing): status.missing for status in waiting}.values()
        # Across all waits, to name each absent rank once.
        absent = sorted({rank for missing in distinct for rank in missing})
        names = ", ".join(map(str, absent)) or "none"
        head = (
            f"deadlock: {len(waiting)} of {len(statuses)} ranks wait and none can run; "
            f"ranks that never came: {names}"
        )
        super().__init__("\n".join([head, *cycle, *_table(statuses)]))


class TimedOut(ZeroSimError, RuntimeError):
    """A wait that timed out because no rank could run.

    Raised in the waiting rank only. As with gloo, the rank may catch it. If not, the run ends with
    the deadlock.

    Args:
        doing: Description of the wait.
        missing: World ranks for which the rank waited.
        deadlock: State of each rank.
        seconds: Length of the time-out, in simulated time.
        message: Replaces the default message, "Timed out waiting".
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
        """Return a copy with another message."""
        return type(self)(
            self.doing, self.missing, self.deadlock, seconds=self.seconds, message=message
        )


def _table(statuses: tuple[RankStatus, ...]) -> list[str]:
    """Format a line per rank. Fold equal neighbours, to keep 1,024 ranks readable."""
    lines: list[str] = []
    start = 0
    # Go past the end, to close the last run of equal ranks.
    for stop in range(1, len(statuses) + 1):
        first = statuses[start]
        if stop < len(statuses) and _same(first, statuses[stop]):
            continue
        last = stop - 1
        who = f"rank {start}" if start == last else f"ranks {start}-{last}"
        place = f" at {first.site}" if first.site else ""
        # 16 ranks are enough to recognise a pattern.
        shown = ", ".join(map(str, first.missing[:16])) + (", ..." if first.missing[16:] else "")
        absent = f"; not there: {shown}" if first.missing else ""
        lines.append(f"  {who}: {first.doing}{place}{absent}")
        lines.extend(f"      after {call}" for call in first.recent)
        start = stop
    return lines


def _same(a: RankStatus, b: RankStatus) -> bool:
    # `is` first, because ranks that share a wait share the tuple and 1,024 elements compare slowly.
    same_missing = a.missing is b.missing or a.missing == b.missing
    return same_missing and (a.doing, a.site, a.recent) == (b.doing, b.site, b.recent)


class ContractViolation(WorldFailure):
    """Calls that NCCL would refuse, hang on or misread.

    Args:
        message: The expected and the actual calls, with their sites.
        aspect: Stable short name of the mismatch: `dtype`, `root`, `swapped-buffers`, ...
        rank: World rank whose call revealed the mismatch.
        other_rank: World rank of the conflicting call. Equals `rank` if a call is wrong by itself.
    """

    def __init__(self, message: str, *, aspect: str, rank: int, other_rank: int) -> None:
        self.aspect = aspect
        self.rank = rank
        self.other_rank = other_rank
        # The ranks' last calls, added in `Run.fail`.
        self.history: tuple[str, ...] = ()
        super().__init__(message)

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *self.history])


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """The program's tensor operation on memory in flight."""

    operation: str
    """Name in torch's dispatcher, such as `aten::add_`."""
    node: str
    """Autograd node that ran the operation or owns the hook; empty outside backward."""
    writes: bool
    file: str
    line: int
    """Innermost frame of the program."""
    start: int
    stop: int
    """Half-open range of touched elements in the collective's tensor, in row-major order."""

    @property
    def site(self) -> str:
        """Call site, `file:line`."""
        return site_of(self.file, self.line)


class DataRace(WorldFailure):
    """A tensor operation on memory in flight, found by the race detector."""

    def __init__(self, rank: int, *, access: Access, buffer: InFlightBuffer) -> None:
        self.rank = rank
        self.access = access
        self.buffer = buffer
        tensor = buffer.tensor if buffer.whole is None else buffer.whole
        place = f" in backward of {access.node}" if access.node else ""
        # Reading an input in flight is allowed, so the remedy depends on the role.
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
            f"Call wait() on the returned work before this line {does} the tensor, or use another "
            "tensor."
        )


class RankStalled(WorldFailure):
    """A rank that held the baton too long without calling torch.distributed."""

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
    """The operation, such as `all_gather #3 of group world`."""
    site: str
    """Call site of the issue, `file:line`."""
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Changed:
    """Elements of lent memory that changed."""

    index: int
    """Index of the first changed element, in row-major order."""
    count: int
    old_bits: int
    """Expected bits of this element, as an unsigned number."""
    new_bits: int
    """Actual bits of this element."""


class InFlightRace(WorldFailure):
    """Memory in flight that a program changed, freed or lent twice, found by a late timing.

    Args:
        what: The event and the memory, such as `input of all_gather #3 of group world changed
            between issue and wait`.
        rank: World rank that owns the memory.
        memory: The memory.
        detail: Expected and actual content.
        hint: The remedy.
        changed: The changed elements; None if the memory is gone or was lent twice.
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
        # Empty if every frame of the call is library code.
        site = memory.site or "(unknown)"
        super().__init__(
            f"rank {rank}: {what}\n"
            f"  issued at {site}; {memory.dtype} of shape {memory.shape}\n"
            f"  {detail}\n"
            f"{hint}"
        )


class ScheduleDiverged(WorldFailure, UsageError):
    """A recorded schedule that does not fit the run. `position` is the first turn that differs."""

    exit_status = UsageError.exit_status

    def __init__(self, message: str, *, position: int) -> None:
        self.position = position
        super().__init__(message)


class RankEnded(BaseException):
    """Unwinds a rank after its world ended. Not an Exception, so that programs do not catch it."""
