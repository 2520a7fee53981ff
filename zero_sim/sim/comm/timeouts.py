"""Time-outs of barriers and stores in simulated time, with gloo's messages.

Simulated time stands still while any rank can run. If none can, the first time-out to end raises in
its rank, which may catch the error. If no time-out is pending, the run ends with a deadlock.
Collectives that move data have no time-out, because memory would be undefined after it. If they
hang, the run always ends with a deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError

from zero_sim.sim.failures import BadArgument, TimedOut

SHORTEST_DEFAULT = timedelta(minutes=10)
"""torch's shortest default, which NCCL uses. The program itself set any shorter time-out."""


def seconds_of(timeout: Any) -> float | None:
    """Return a program's time-out in seconds; None for torch's defaults and other types."""
    # torch passes its defaults, 10 to 30 minutes, in the same way as a program's own time-outs.
    if not isinstance(timeout, timedelta) or not timedelta(0) < timeout < SHORTEST_DEFAULT:
        return None
    return timeout.total_seconds()


def check_monitored(timeout: Any, *, group_rank: int) -> None:
    """Raise BadArgument if rank 0's time-out for a monitored barrier is not positive."""
    if group_rank == 0 and isinstance(timeout, timedelta) and timeout <= timedelta(0):
        raise BadArgument(
            "monitored_barrier",
            "Rank 0 timed out in monitoredBarrier after 0 ms",
            "Expected a time-out of more than 0, so that the other ranks can arrive.",
        )


def after_monitored(
    error: TimedOut, *, group_rank: int, ranks: Sequence[int], wait_all_ranks: bool
) -> TimedOut:
    """Return a member's error after a monitored barrier timed out, with gloo's message.

    `error` is the time-out on group rank 0. `wait_all_ranks` is False to name only one absent rank.
    """
    if group_rank:
        # The other members only see that rank 0 left.
        message = (
            f"Rank {group_rank} successfully reached monitoredBarrier, but received errors while "
            "waiting for send/recv from rank 0. Please check rank 0 logs for faulty rank."
        )
    else:
        # gloo names group ranks.
        absent = [ranks.index(rank) for rank in error.missing]
        named = absent if wait_all_ranks else absent[:1]
        who = f"Rank{'s' if len(named) > 1 else ''} {', '.join(map(str, named))}"
        message = f"{who} failed to pass monitoredBarrier in {error.seconds * 1000:g} ms"
    return error.saying(message)


def after_another(error: TimedOut) -> TimedOut:
    """Return the error for other members after a member gave up a collective."""
    return error.saying(f"Connection closed by peer: {error}")


class StoreTimedOut(TimedOut, DistStoreError):
    """A time-out in a wait for a store's keys."""


def store_timed_out(error: TimedOut, keys: Sequence[str]) -> StoreTimedOut:
    """Return the error for a wait for keys that timed out, with torch's message."""
    message = f"wait timeout after {error.seconds * 1000:g}ms, keys: {', '.join(keys)}"
    return StoreTimedOut(
        error.doing, error.missing, error.deadlock, seconds=error.seconds, message=message
    )


class ConnectTimedOut(TimedOut, DistNetworkError):
    """A time-out in a wait for a TCPStore's host."""


def connect_timed_out(error: TimedOut, host: str, port: int) -> ConnectTimedOut:
    """Return the error if no TCPStore listens at an address in time, with torch's message."""
    message = (
        f"The client socket has timed out after {error.seconds * 1000:g}ms while trying to "
        f"connect to ({host}, {port})."
    )
    # A DistNetworkError too, because torch raises that here.
    return ConnectTimedOut(
        error.doing, error.missing, error.deadlock, seconds=error.seconds, message=message
    )


def clients_timed_out(error: TimedOut, joined: int, count: int) -> StoreTimedOut:
    """Return the error for a store's host if clients are missing, with torch's message."""
    message = (
        f"Timed out after {error.seconds:g} seconds waiting for clients. {joined}/{count} clients "
        "joined."
    )
    return StoreTimedOut(
        error.doing, error.missing, error.deadlock, seconds=error.seconds, message=message
    )
