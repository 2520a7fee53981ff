"""How a run of the simulated world can end badly, each naming the culprit."""

from __future__ import annotations

from dataclasses import dataclass

from zero_sim.errors import ZeroSimError
from zero_sim.sim.flight import Flight


class WorldFailure(ZeroSimError):
    """The program that ran on the world did something wrong; root of the classes below."""


class RankFailed(WorldFailure):
    """A rank raised; the world ended and this carries the rank and its traceback."""

    def __init__(self, rank: int, error: BaseException, traceback_text: str) -> None:
        self.rank = rank
        self.error = error
        self.traceback_text = traceback_text
        super().__init__(
            f"rank {rank} raised {type(error).__name__}: {error}\n{traceback_text.rstrip()}"
        )


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


class Deadlock(WorldFailure):
    """No rank can run and not all have returned; carries who waits for what."""

    def __init__(self, statuses: tuple[RankStatus, ...]) -> None:
        self.statuses = statuses
        waiting = [status for status in statuses if status.missing or status.site]
        absent = sorted({rank for status in waiting for rank in status.missing})
        names = ", ".join(map(str, absent)) or "none"
        head = (
            f"deadlock: {len(waiting)} of {len(statuses)} ranks wait and none can run; "
            f"ranks that never came: {names}"
        )
        super().__init__("\n".join([head, *_table(statuses)]))


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
        start = stop
    return lines


def _same(a: RankStatus, b: RankStatus) -> bool:
    return (a.doing, a.site, a.missing) == (b.doing, b.site, b.missing)


class ContractViolation(WorldFailure):
    """Two ranks met in one collective with calls that do not fit; carries both call sites."""

    def __init__(self, message: str, *, rank: int, other_rank: int) -> None:
        self.rank = rank
        self.other_rank = other_rank
        super().__init__(message)


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
        return f"{self.file}:{self.line}"


class DataRace(WorldFailure):
    """A rank used memory that it had lent to an operation and not waited for; carries both."""

    def __init__(self, rank: int, *, access: Access, flight: Flight) -> None:
        self.rank = rank
        self.access = access
        self.flight = flight
        tensor = flight.tensor if flight.whole is None else flight.whole
        place = f" in backward of {access.node}" if access.node else ""
        does, busy = (
            ("writes", "still read") if flight.role == "input" else ("uses", "still written")
        )
        verb = "writes" if access.writes else "reads"
        super().__init__(
            f"data race on rank {rank}: {access.operation} at {access.site}{place} {verb} elements "
            f"{access.start} to {access.stop} of the {flight.role} of {flight.what}, which is in "
            f"flight\n"
            f"  issued at {flight.site} and not waited for\n"
            f"  {flight.role}: shape {tuple(tensor.shape)}, {tensor.dtype}, {busy} until then\n"
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


class RankEnded(BaseException):
    """Unwinds a rank whose world has ended; not an Exception, so that programs do not catch it."""
