"""Device meshes that know which rank made them; torch's private names for that stand here.

[Note: meshes of one rank]
Two meshes of the same ranks are equal for torch, whichever rank made them, since a process has one
rank. DTensor keeps what it works out for a mesh (how to redistribute, which shard is whose) in
caches of the process, keyed by the mesh. Ranks of one process must not find each other's answers
there, nor those of a program that ran before, whose meshes hold groups that are gone. So a mesh is
given a key of its rank and program, in the place where torch keeps the thread for its own tests
with a rank a thread; and when a program ends, what the caches hold for its meshes is forgotten.

A mesh of one dimension over the default group of a world that stays is the exception: that group is
there in the next program, too, and answers for such a mesh are those that it needs. Its key is of
the group, and what is kept for it stays, since working it out anew is two thirds of what a short
run of FSDP2 takes.
"""

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


class _Program(threading.local):
    """The program of the running thread, if it is a rank."""

    key: int | None = None
    has_meshes: bool = False
    """Whether a mesh has that key."""
    group_key: int | None = None
    """Of the default group that the thread has, for as long as it has it."""
    has_lasting: bool = False
    """Whether a mesh has that one."""


_program = _Program()


def begin_program() -> None:
    """Tell meshes that the calling rank makes from now on from all others."""
    _program.key = next(_keys)
    _program.has_meshes = False
    if _program.group_key is None:
        _program.group_key = next(_keys)


def end_group() -> None:
    """Forget what torch keeps for the default group of the calling rank, which is no more."""
    _program.group_key = next(_keys)
    if _program.has_lasting:
        _program.has_lasting = False
        _clear_caches()


def end_program() -> None:
    """Forget what torch keeps for the meshes that the calling rank's program alone can use."""
    if _program.has_meshes:
        _program.has_meshes = False
        _clear_caches()


def _clear_caches() -> None:
    for module_name, path in CACHES:
        cache: Any = sys.modules.get(module_name)
        for name in path.split("."):
            cache = getattr(cache, name, None)
        if cache is not None:
            (getattr(cache, "cache_clear", None) or cache.clear)()
    # torch's C++ code keeps one for each thread, this one clears that of the caller.
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
"""Unbounded caches whose keys hold a mesh; others of torch's keep only a few entries."""


def _marked(original: Callable[..., None]) -> Callable[..., None]:
    """A method that sets a mesh up, and marks it as the running rank's."""

    @functools.wraps(original)
    def set_up(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if _program.key is not None:
            lasts = _is_over_default_group(self)
            self._thread_id = _program.group_key if lasts else _program.key
            self._hash = None
            _program.has_meshes |= not lasts
            _program.has_lasting |= lasts

    return set_up


def _is_over_default_group(mesh: Any) -> bool:
    """Whether a mesh has one dimension, is part of no other and has the rank's default group."""
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
    """Mark meshes from now on; for the first world that opens."""
    for name in ("__init__", "__setstate__"):
        _originals[name] = getattr(DeviceMesh, name)
        setattr(DeviceMesh, name, _marked(_originals[name]))


def uninstall() -> None:
    """Give torch its own methods back, when the last world closes."""
    for name, original in _originals.items():
        setattr(DeviceMesh, name, original)
    _originals.clear()
