"""Time-outs: how long barriers and stores wait in simulated time, and what gloo says after one.

Simulated time stands still as long as any rank can run. Where none can, the time-out that is the
first to be over is raised in its rank, which may catch it; a run in which none does ends with the
deadlock. Collectives that move data have no time-out: what would be in their memory after one is
not defined, so that such a hang is always told as the deadlock that it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError

from zero_sim.sim.failures import BadArgument, TimedOut

SHORTEST_DEFAULT = timedelta(minutes=10)
"""Of the time-outs that torch passes where a program sets none; that of NCCL."""


def seconds_of(timeout: Any) -> float | None:
    """A time-out in seconds; None for none, and for one that no program set, but torch.

    Args:
        timeout: A `timedelta`; what is none, as torch's options where nothing is set, counts as
            none.
    """
    if not isinstance(timeout, timedelta) or not timedelta(0) < timeout < SHORTEST_DEFAULT:
        return None
    return timeout.total_seconds()


def check_monitored(timeout: Any, *, group_rank: int) -> None:
    """Check that the time-out of a monitored barrier leaves rank 0 any time.

    Raises:
        BadArgument: It does not.
    """
    if group_rank == 0 and isinstance(timeout, timedelta) and timeout <= timedelta(0):
        raise BadArgument(
            "monitored_barrier",
            "Rank 0 timed out in monitoredBarrier after 0 ms",
            "Expected a time-out of more than 0, in which the other ranks can come.",
        )


def after_monitored(
    error: TimedOut, *, group_rank: int, ranks: Sequence[int], wait_all_ranks: bool
) -> TimedOut:
    """What a member of a monitored barrier gets whose time was over, in gloo's words.

    Args:
        error: The time-out, of rank 0 of the group.
        group_rank: The member.
        ranks: World ranks of the group.
        wait_all_ranks: Whether all ranks are named that did not come, and not the first.
    """
    if group_rank:
        message = (
            f"Rank {group_rank} successfully reached monitoredBarrier, but received errors while "
            "waiting for send/recv from rank 0. Please check rank 0 logs for faulty rank."
        )
    else:
        absent = [ranks.index(rank) for rank in error.missing]
        named = absent if wait_all_ranks else absent[:1]
        who = f"Rank{'s' if len(named) > 1 else ''} {', '.join(map(str, named))}"
        message = f"{who} failed to pass monitoredBarrier in {error.seconds * 1000:g} ms"
    return error.saying(message)


def after_another(error: TimedOut) -> TimedOut:
    """What the other members get of a collective that one of them has given up."""
    return error.saying(f"Connection closed by peer: {error}")


class StoreTimedOut(TimedOut, DistStoreError):
    """A rank's time-out was over in the wait for keys of a store."""


def store_timed_out(error: TimedOut, keys: Sequence[str]) -> StoreTimedOut:
    """What a rank gets whose time was over in a wait for keys, in torch's words."""
    message = f"wait timeout after {error.seconds * 1000:g}ms, keys: {', '.join(keys)}"
    return StoreTimedOut(
        error.doing, error.missing, error.deadlock, seconds=error.seconds, message=message
    )


class ConnectTimedOut(TimedOut, DistNetworkError):
    """A rank's time-out was over before anybody listened where it wants to connect."""


def connect_timed_out(error: TimedOut, host: str, port: int) -> ConnectTimedOut:
    """What a rank gets that finds nobody at an address, in torch's words."""
    message = (
        f"The client socket has timed out after {error.seconds * 1000:g}ms while trying to "
        f"connect to ({host}, {port})."
    )
    return ConnectTimedOut(
        error.doing, error.missing, error.deadlock, seconds=error.seconds, message=message
    )


def clients_timed_out(error: TimedOut, joined: int, count: int) -> StoreTimedOut:
    """What a rank gets to whose store not all have come that it waits for, in torch's words."""
    message = (
        f"Timed out after {error.seconds:g} seconds waiting for clients. {joined}/{count} clients "
        "joined."
    )
    return StoreTimedOut(
        error.doing, error.missing, error.deadlock, seconds=error.seconds, message=message
    )
