"""State of the running thread: its rank, c10d world and starter; and forked processes."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zero_sim.errors import UsageError

if TYPE_CHECKING:
    from zero_sim.sim.comm.process_group import SimProcessGroup
    from zero_sim.sim.comm.torch_stores import StoreWaits

_STARTER = "_zero_sim_started_by"

_forked_by: int | None = None
"""The rank that forked this process; None if no rank did."""


class RankC10dWorld:
    """The fields of torch's `_World`, for a single rank."""

    def __init__(self) -> None:
        self.default_pg: Any = None
        self.pg_map: dict[Any, Any] = {}
        self.pg_names: dict[Any, str] = {}
        self.pg_group_ranks: dict[Any, dict[int, int]] = {}
        self.pg_backend_config: dict[Any, str] = {}
        self.group_count = 0
        self.tags_to_pg: dict[str, list[Any]] = {}
        self.pg_to_tag: dict[Any, str] = {}
        self.pg_coalesce_state: dict[Any, list[Any]] = {}
        self.comms: list[Any] = []

    @property
    def pg_config_info(self) -> list[dict[str, Any]]:
        """Same as torch's `_World.pg_config_info`."""
        return [
            {
                "pg_name": name,
                "pg_desc": group.group_desc,
                "backend_config": self.pg_backend_config[group],
                "ranks": list(self.pg_group_ranks[group]),
                "group_size": len(self.pg_group_ranks[group]),
                "group_count": self.group_count,
            }
            for group, name in self.pg_names.items()
        ]


class RankState(threading.local):
    """The running thread's state as a rank."""

    # Class attributes are the defaults for other threads.
    rank: int | None = None
    leave: Callable[[int], None] | None = None
    """Ends the world if the rank calls os._exit. Takes the exit status."""
    c10d_world: RankC10dWorld | None = None
    join: Callable[[], None] | None = None
    make_group: Callable[[str, list[int], int], SimProcessGroup] | None = None
    announce: Callable[[str, list[int]], None] | None = None
    stores: StoreWaits | None = None
    run: object = None
    """The program's `Run`."""

    def forget(self) -> None:
        """Clear everything, because the thread is no longer a rank."""
        self.stores = self.run = None
        self.rank = self.leave = self.c10d_world = None
        self.join = self.make_group = self.announce = None


rank_state = RankState()
"""State of the running thread. All fields are None if it is no rank."""


@dataclass(frozen=True, slots=True)
class Starter:
    """The rank that started a thread, directly or through other threads."""

    rank: int
    c10d_world: RankC10dWorld
    run: object
    """The `Run` in which the rank started the thread."""


def starter() -> Starter | None:
    """Return the rank that started the running thread; None if none did, or in a rank."""
    # Rank threads are started by the world and have no starter.
    if rank_state.rank is not None:
        return None
    return getattr(threading.current_thread(), _STARTER, None)


def start_thread(original: Callable[[threading.Thread], None]) -> Callable[..., None]:
    """Wrap Thread.start (`original`), to note the rank that starts a thread."""

    @functools.wraps(original)
    def start(thread: threading.Thread, *args: Any, **kwargs: Any) -> None:
        rank, world = rank_state.rank, rank_state.c10d_world
        # If a rank's helper thread starts a thread, it belongs to the same rank.
        by = starter() if rank is None or world is None else Starter(rank, world, rank_state.run)
        if by is not None:
            setattr(thread, _STARTER, by)
        original(thread, *args, **kwargs)

    return start


class ThreadWorld:
    """Replaces torch's `_World`, and forwards to the running thread's world."""

    def __init__(self, original: Any) -> None:
        # Not through our own __setattr__, which forwards.
        object.__setattr__(self, "_original", original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._running(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._running(), name, value)

    def _running(self) -> Any:
        if rank_state.c10d_world is not None:
            return rank_state.c10d_world
        by = starter()
        # As in a process, a thread sees its rank's groups. `SimCluster` refuses calls on them.
        return self._original if by is None else by.c10d_world


def no_rank() -> str:
    """Return the message for a thread that calls torch.distributed but is no rank."""
    return (
        f"This thread, {threading.current_thread().name!r}, is no rank: while a zero_sim.World "
        "runs, a rank is a thread. A thread that a rank starts (threading.Thread, "
        "asyncio.to_thread, an executor) can see the rank's groups, but not call them. Call "
        "torch.distributed in the rank's own thread and pass on results. Save checkpoints with "
        "dcp.save, not dcp.async_save."
    )


def running_rank() -> int:
    """Return the calling thread's rank. Raise UsageError if the thread is no rank."""
    if rank_state.rank is None:
        check_not_forked()
        raise UsageError(no_rank())
    return rank_state.rank


def is_forked() -> bool:
    """Return True in a process that a rank forked."""
    return _forked_by is not None


def check_not_forked() -> None:
    """Raise UsageError in a process that a rank forked, because the other ranks are missing."""
    # Checked at each call, because a fork can happen at any time.
    if _forked_by is not None:
        raise UsageError(
            f"expected a rank, got a process that rank {_forked_by} forked (process "
            f"{os.getpid()}), which contains no other rank. Call torch.distributed in the rank "
            "itself. If a process needs groups of its own, start it with multiprocessing's "
            "method 'spawn'."
        )


# [Note: a forked process] A process that a rank forks contains only that rank's thread, so a call
# into the world would wait for other ranks forever. It is refused. When the rank's program ends in
# the fork, the process ends.
def _after_fork_in_child() -> None:
    global _forked_by
    # Forks of other threads need nothing.
    if rank_state.rank is not None:
        _forked_by = rank_state.rank
        rank_state.forget()


os.register_at_fork(after_in_child=_after_fork_in_child)
