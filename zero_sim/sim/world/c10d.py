"""c10d's process-wide state, one per rank. torch's private names for it stay in here.

[Note: rank-local c10d]
torch keeps one "world" (default group, group names, tags) per process. While a simulated world is
open, an object that looks up the running thread replaces it: a rank's thread, and threads that it
starts, see the rank's world; all other threads see the original. Two functions are wrapped in the
same way. Inside a rank, `init_process_group` joins the simulated world, and groups with
`backend="gloo"` or `"nccl"` are simulated. Checked against torch 2.13.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c_bindings
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d

from zero_sim.errors import UsageError
from zero_sim.sim.comm.backend_options import present_devices
from zero_sim.sim.comm.process_group import SimProcessGroup
from zero_sim.sim.comm.torch_stores import StoreWaits
from zero_sim.sim.world import meshes, torch_futures
from zero_sim.sim.world.rank_threads import (
    RankC10dWorld,
    ThreadWorld,
    no_rank,
    rank_state,
    start_thread,
    starter,
)


def _create_group(options: Any, backend_options: Any) -> SimProcessGroup:
    """Create a group for the backend `sim`. torch calls this."""
    if rank_state.make_group is None:
        raise RuntimeError(
            "expected backend 'sim' inside a rank of zero_sim.World, got it outside. "
            "Create the group in a program that World.run runs."
        )
    # Empty for the default group.
    ranks = list(options.global_ranks_in_group)
    return rank_state.make_group(options.group_id, ranks, options.group_rank)


def _register_backend() -> None:
    if not hasattr(dist.Backend, "SIM"):
        dist.Backend.register_backend(
            "sim", _create_group, extended_api=True, devices=present_devices()
        )


def _wrap_init(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        if starter() is not None:
            raise UsageError(no_rank())
        if rank_state.join is None:
            return original(*args, **kwargs)
        requested = signature.bind(*args, **kwargs).arguments
        if requested.get("backend") == FAKE:
            _leave_groups()
            return original(*args, **kwargs)
        _check_device(requested.get("device_id"))
        # The world exists already, so this ignores the program's address and ranks.
        rank_state.join()
        group = c10d._get_default_group()
        if isinstance(group, SimProcessGroup):
            _check_place(group, requested)
            _name_backend(group, requested)
        return None

    return init_process_group


FAKE = "fake"
"""torch's backend that moves no data. A program that requests it gets it, also in a rank."""


def _leave_groups() -> None:
    # In C++ and in Python: the fake backend starts without groups.
    c_bindings._unregister_all_process_groups()
    rank_state.c10d_world = RankC10dWorld()


def _check_place(group: SimProcessGroup, requested: Mapping[str, Any]) -> None:
    for name, have in (("rank", group.rank()), ("world_size", group.size())):
        wanted = requested.get(name, -1)
        # -1 is torch's default: read the value from the environment.
        if wanted not in (-1, None, have):
            raise ValueError(
                f"expected {name}={have} in init_process_group, as in the simulated world, got "
                f"{name}={wanted}. Omit the argument, or take it from the environment."
            )


def _check_device(device: Any) -> None:
    """Refuse the same devices as torch, with torch's message."""
    if isinstance(device, torch.device) and (device.index is None or device.type == "cpu"):
        raise ValueError(
            "init_process_group device_id parameter must be an accelerator with an index; got "
            f"device {str(device)!r}"
        )


def _name_backend(group: SimProcessGroup, requested: Mapping[str, Any]) -> None:
    """Give a new group the name and time-out of the backend in a program's arguments, if any."""
    world, name = rank_state.c10d_world, requested.get("backend")
    assert world is not None
    if not name:
        return
    backend = dist.Backend(str(name))
    # A backend per device kind looks like `cpu:gloo,cuda:nccl`.
    parts = [part.split(":")[-1] for part in backend.split(",")]
    # torch's own check only sees `sim`, so repeat it here.
    if unknown := [part for part in parts if part not in dist.Backend.backend_list]:
        raise ValueError(
            f"Invalid backend: {unknown[0]!r}; expected one of "
            f"{', '.join(dist.Backend.backend_list)}"
        )
    group.set_backend(str(backend), timeout=requested.get("timeout"))
    world.pg_map[group] = (backend, world.pg_map[group][1])


def _wrap_helper(original: Callable[..., Any]) -> Callable[..., Any]:
    # Names instead of Signature.bind, which would double the time of this call.
    names = tuple(inspect.signature(original).parameters)

    @functools.wraps(original)
    def new_process_group_helper(*args: Any, **kwargs: Any) -> Any:
        if rank_state.c10d_world is None:
            return original(*args, **kwargs)
        requested = dict(zip(names, args, strict=False)) | kwargs
        if requested.get("backend") == FAKE:
            return original(*args, **kwargs)
        ranks = list(requested["global_ranks_in_group"])
        if ranks and rank_state.announce is not None:
            # Not in `_create_group`: torch does not call it on ranks outside the group.
            rank_state.announce(requested["group_name"], ranks)
        passed = requested | {"backend": dist.Backend("sim")}
        # `sim` has no use for options and device of the requested backend.
        for name in ("backend_options", "device_id"):
            passed.pop(name, None)
        group, store = original(**passed)
        if isinstance(group, SimProcessGroup):
            group.set_group_store(store)
            _name_backend(group, requested)
        return group, store

    return new_process_group_helper


def _isolate_threads(isolated: bool) -> None:
    """Give each thread its own C++ group registry, which functional collectives look up."""
    c_bindings._set_thread_isolation_mode(isolated)  # pyrefly: ignore [missing-attribute]


_lock = threading.Lock()
_open_count = 0
_originals: dict[str, Any] = {}


def install() -> None:
    """Make c10d rank-local. Counted, because several worlds may be open."""
    global _open_count
    with _lock:
        _open_count += 1
        if _open_count > 1:
            return
        _register_backend()
        _originals.update(
            world=c10d._world, init=c10d.init_process_group, helper=c10d._new_process_group_helper
        )
        _originals["start"] = threading.Thread.start
        threading.Thread.start = start_thread(_originals["start"])
        c10d._world = ThreadWorld(c10d._world)  # pyrefly: ignore [bad-assignment]
        c10d._new_process_group_helper = _wrap_helper(_originals["helper"])
        wrapped = _wrap_init(_originals["init"])
        # Creating a mesh calls init_process_group if there is no default group.
        c10d.init_process_group = dist.init_process_group = wrapped
        device_mesh.init_process_group = wrapped  # pyrefly: ignore [missing-attribute]
        meshes.install()
        torch_futures.install()
        _isolate_threads(True)


def uninstall() -> None:
    """Restore torch's state when the last world closes."""
    global _open_count
    with _lock:
        _open_count -= 1
        if _open_count:
            return
        threading.Thread.start = _originals["start"]
        c10d._world = _originals["world"]
        c10d._new_process_group_helper = _originals["helper"]
        c10d.init_process_group = dist.init_process_group = _originals["init"]
        device_mesh.init_process_group = _originals["init"]  # pyrefly: ignore [missing-attribute]
        meshes.uninstall()
        torch_futures.uninstall()
        _isolate_threads(False)


def enter_rank_thread(
    *,
    rank: int,
    leave: Callable[[int], None],
    join: Callable[[], None],
    make_group: Callable[[str, list[int], int], SimProcessGroup],
    announce: Callable[[str, list[int]], None],
    stores: StoreWaits,
) -> None:
    """Make the calling thread a rank, with its own c10d state."""
    # Run autograd in this thread: its other threads are no ranks, so hooks in them could not issue
    # collectives.
    torch.autograd.set_multithreading_enabled(False)
    rank_state.rank = rank
    rank_state.leave = leave
    rank_state.c10d_world = RankC10dWorld()
    rank_state.join = join
    rank_state.make_group = make_group
    rank_state.announce = announce
    rank_state.stores = stores
    meshes.begin_program()


def leave_rank_thread() -> None:
    """Drop torch's cache entries for the calling rank's default group."""
    meshes.end_group()


def use_one_compute_thread() -> None:
    """Limit the calling rank to one compute thread. Called before every program."""
    # In this thread, because MKL does not adopt the count from another thread.
    torch.set_num_threads(1)
    # On a thread's first computation, torch applies the process-wide count, which another thread
    # may have changed. A read counts as a computation, so later computations keep 1.
    torch.get_num_threads()


def init_default_group(*, rank: int, world_size: int, store: dist.Store) -> None:
    """Make the calling rank's default group, with torch's own functions."""
    # Not torch's init_process_group: it would build a table of all ranks on each rank, and chain an
    # excepthook for each rank.
    backend = dist.Backend("sim")
    group, _ = c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        backend,
        dist.PrefixStore("default_pg", store),
        c10d._process_group_name([], use_hashed_name=False),
        timeout=c10d._get_default_timeout(backend),
        group_desc="default_pg",
    )
    assert not isinstance(group, int), "torch has a number for groups that a rank is not in"
    c10d._update_default_pg(group)
    # torch's table from world rank to group rank, shared by all ranks.
    c10d._world.pg_group_ranks[group] = _ranks_themselves(world_size)


@functools.lru_cache(maxsize=16)
def _ranks_themselves(world_size: int) -> dict[int, int]:
    return {rank: rank for rank in range(world_size)}


_NO_SUCH_GROUP = (
    "Default process group has not been initialized",
    "is not registered",
    "is not initialized in the world group map",
    "Invalid process group specified",
    "Process group cannot be None",
)
"""Parts of torch's messages about missing groups."""


def is_about_a_missing_group(error: BaseException) -> bool:
    """Return True if torch raised the error because a group is missing or was destroyed."""
    text = str(error)
    return isinstance(error, (ValueError, AssertionError)) and any(
        words in text for words in _NO_SUCH_GROUP
    )


def reset_rank(*, keep: bool) -> None:
    """Forget the calling rank's groups after a program ended.

    With `keep`, the default group may stay for the next program.
    """
    world = rank_state.c10d_world
    assert world is not None
    # The next program must not inherit torch's thread-local settings.
    torch.set_grad_enabled(True)
    torch.set_default_device(None)
    meshes.end_program()
    meshes.begin_program()
    group = world.default_pg
    # Only the default group: other groups belong to the program.
    warm = keep and isinstance(group, SimProcessGroup) and len(world.pg_map) == 1
    if warm and not world.pg_coalesce_state:
        _name_backend(group, {"backend": "sim"})
        # The default group has name 0, so the next program's groups start at 1.
        world.group_count = 1
        return
    meshes.end_group()
    c_bindings._unregister_all_process_groups()
    rank_state.c10d_world = RankC10dWorld()
