"""Separate caches for each rank's device meshes. torch's private names stay in here."""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

_keys = itertools.count()


# [Note: meshes of a rank] For torch, two meshes over the same ranks are equal, because a process
# normally has a single rank. DTensor caches results (how to redistribute, which rank has which
# shard) in process-wide caches, keyed by mesh. Simulated ranks must not share these results. Nor
# must later programs, because an earlier program's groups are gone. So each mesh gets a key for its
# rank and program, in place of the thread id that torch stores for its own tests with a thread per
# rank. When a program ends, its meshes' cache entries are dropped.
#
# The exception is a 1D mesh over the default group of a world that stays open: the next program has
# the same group and needs the same results. So the mesh's key belongs to the group and the entries
# stay. Recomputing them would take two thirds of a short FSDP2 run.
class _Program(threading.local):
    """Keys for the meshes of the running thread, if it is a rank."""

    key: int | None = None
    has_meshes: bool = False
    """True if a mesh has `key`."""
    group_key: int | None = None
    """Key for the rank's default group, as long as the group exists."""
    has_lasting: bool = False
    """True if a mesh has `group_key`."""


_program = _Program()


def begin_program() -> None:
    """Set a new key for later meshes of the calling rank."""
    _program.key = next(_keys)
    _program.has_meshes = False
    if _program.group_key is None:
        _program.group_key = next(_keys)


def end_group() -> None:
    """Drop torch's cache entries for the calling rank's default group, which was destroyed."""
    _program.group_key = next(_keys)
    if _program.has_lasting:
        _program.has_lasting = False
        _clear_caches()


def end_program() -> None:
    """Drop torch's cache entries for meshes of the calling rank's program."""
    # Clearing affects all ranks, so skip it if nothing can be stale.
    if _program.has_meshes:
        _program.has_meshes = False
        _clear_caches()


def _clear_caches() -> None:
    for module_name, path in CACHES:
        cache: Any = sys.modules.get(module_name)
        for name in path.split("."):
            # None if the program has not imported the module.
            cache = getattr(cache, name, None)
        if cache is not None:
            (getattr(cache, "cache_clear", None) or cache.clear)()
    # C++ has a cache per thread. This clears the caller's.
    torch._C._clear_DTensor_sharding_propagator_cache()


CACHES = (
    ("torch.distributed.tensor._redistribute", "_gen_transform_infos"),
    ("torch.distributed.tensor._redistribute", "_planner_cache"),
    ("torch.distributed.tensor._redistribute", "_warned_flatten_issues"),
    ("torch.distributed.tensor._collective_utils", "MeshTopoInfo.build_from_mesh"),
    (
        "torch.distributed.tensor._api",
        "DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding",
    ),
    (
        "torch.distributed.tensor._api",
        "DTensor._op_dispatcher.sharding_propagator._propagate_tensor_meta_cached",
    ),
)
"""torch's unbounded caches with meshes in their keys. Other caches keep only a few entries."""


def _marked(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap a method that sets up a mesh. Give the mesh the running rank's key."""

    @functools.wraps(original)
    def set_up(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if _program.key is not None:
            lasts = _is_over_default_group(self)
            self._thread_id = _program.group_key if lasts else _program.key
            # torch may have computed the hash already, which includes the key.
            self._hash = None
            _program.has_meshes |= not lasts
            _program.has_lasting |= lasts

    return set_up


def _is_over_default_group(mesh: Any) -> bool:
    """Return True for a 1D mesh over the rank's default group that is not a submesh."""
    names = getattr(mesh, "_dim_group_names", None)
    default = c10d._world.default_pg
    return (
        names is not None
        and len(names) == 1
        and getattr(mesh, "_root_mesh", None) is None
        and default is not None
        and names[0] == default.group_name
    )


_originals: dict[str, Any] = {}


def install() -> None:
    """Give meshes keys from now on. Called for the first world that opens."""
    for name in ("__init__", "__setstate__"):
        _originals[name] = getattr(DeviceMesh, name)
        setattr(DeviceMesh, name, _marked(_originals[name]))


def uninstall() -> None:
    """Restore torch's methods when the last world closes."""
    for name, original in _originals.items():
        setattr(DeviceMesh, name, original)
    _originals.clear()
