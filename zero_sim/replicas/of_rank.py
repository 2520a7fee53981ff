"""A rank's tensors that should be replicas, found and compared when forwards use them.

[Note: as the next forward uses them]
Between `Optimizer.step` and the gather of its results, replicas may differ in a correct script. So
they are compared when a forward with gradients uses them. Evaluations are ignored, because they may
swap in averaged weights.

[Note: steps of a rank's own]
Local SGD steps without a reduction on purpose. So if no rank's DistributedDataParallel reduced
gradients before a step, a difference after it is only a warning.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

from zero_sim.replicas.check import ReplicaCheck, ReplicaKey, ValueIndex
from zero_sim.sim.dispatch import has_own_dispatch
from zero_sim.sim.world.rank_threads import rank_state
from zero_sim.sim.world.run import Run

# torch's communication hooks that leave gradients local on purpose.
_LOCAL_HOOKS = ("post_localSGD_hook", "noop_hook")
_KNOWN_HOOKS = "torch.distributed.algorithms"
# Attributes in which wrappers keep the module: DDP, torch.compile, FSDP, checkpointing.
_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def plain_name(name: str) -> str:
    """Return a param's name without the parts that module wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def world_size_of_run() -> int:
    """Return the number of ranks in the calling rank's run."""
    run = rank_state.run
    assert isinstance(run, Run)
    return len(run.buffers)


@dataclass(slots=True, eq=False)
class _Wrapper:
    module: Any
    label: str
    params: frozenset[int]
    """Ids of reduced params."""
    ranks: tuple[int, ...]
    trains: bool = False
    """True during a forward with gradients."""
    reducing_forwards: int = 0
    broadcasts: int = 0
    broadcasts_now: bool = False
    reduced: bool = False
    """True if a forward since the last step reduces gradients."""
    reduced_before_step: bool = True
    joined: bool = False
    """True as soon as `Join` is used, with which ranks may read different numbers of batches."""

    def begin_forward(self, *, trains: bool) -> None:
        """Read the wrapper's state before its forward."""
        module = self.module
        self.trains = trains
        self.joined |= module._join_config.enable
        # DDP's predicate is cheap and has no side effects.
        self.broadcasts_now = bool(module._check_sync_bufs_pre_fwd())
        self.broadcasts += self.broadcasts_now
        if self.trains and module.require_backward_grad_sync:
            self.reduced = True
            self.reducing_forwards += 1

    def key(self, name: str, tensor: Tensor) -> ReplicaKey:
        """Return the key for a param or buffer in the wrapper."""
        return ReplicaKey(self.label, name, tuple(tensor.shape), self.ranks)

    def excuse(self) -> str:
        """Return a reason why params may differ in a correct script; "" if there is none."""
        for hook, _ in self.module._comm_hooks:
            name = getattr(hook, "__qualname__", type(hook).__name__)
            known = getattr(hook, "__module__", "").startswith(_KNOWN_HOOKS)
            # An unknown hook may, for example, only communicate every few steps.
            if name in _LOCAL_HOOKS or not known:
                return f"{self.label} has the communication hook {name}"
        if not self.reduced_before_step:
            return f"no backward of {self.label} reduced gradients before this step"
        return ""


@dataclass(slots=True)
class RankReplicas:
    """A rank's replicas, passed to the check when forwards use them."""

    rank: int
    check: ReplicaCheck
    world_size: int
    _wrappers: list[_Wrapper] = field(default_factory=list)
    _wrapped: dict[int, tuple[_Wrapper, str]] = field(default_factory=dict)
    """Wrapper and name in it, by id of the wrapped module."""
    _sharded: dict[tuple[int, str], tuple[Any, int]] = field(default_factory=dict)
    """Mesh and id of DTensors by module and name, because FSDP replaces them during forwards."""
    _steps: Counter[int] = field(default_factory=Counter)
    """Optimizer steps on each tensor, by id."""
    _latest: dict[ReplicaKey, ValueIndex] = field(default_factory=dict)
    _trains: bool = False

    def begin_outermost(self, root: Module, *, trains: bool) -> None:
        """Handle the start of an outermost forward, before FSDP unshards params."""
        self._trains = trains
        if not trains:
            return
        for module in root.modules():
            for name, param in module._parameters.items():
                if isinstance(param, DTensor):
                    self._sharded[id(module), name] = param.device_mesh, id(param)

    def begin_forward(self, module: Module, name: str | None, *, steps: int, trains: bool) -> None:
        """Handle the start of a module's forward, and compare its buffers."""
        if isinstance(module, DistributedDataParallel):
            self._wrapper(module).begin_forward(trains=trains)
        if not self._trains:
            return
        wrapper, _ = self._wrapped.get(id(module), (None, ""))
        if wrapper is not None and module is wrapper.module.module:
            self._compare_broadcast(wrapper)
        # Except batch norms, whose statistics depend on the rank's own rows.
        elif wrapper is None and name is not None and not isinstance(module, _NormBase):
            for each, buffer in module._buffers.items():
                if buffer is not None and _is_plain(buffer):
                    key = ReplicaKey("", f"{name}.{each}".lstrip("."), tuple(buffer.shape))
                    self._compare(key, ValueIndex(steps), buffer)

    def _compare_broadcast(self, wrapper: _Wrapper) -> None:
        """Compare all buffers that were just broadcast, before forwards change them."""
        if not wrapper.broadcasts_now:
            return
        broadcast = {id(each) for each in wrapper.module.modules_buffers}
        for name, buffer in wrapper.module.module.named_buffers():
            if id(buffer) in broadcast and _is_plain(buffer):
                key = wrapper.key(plain_name(name), buffer)
                self._compare(key, ValueIndex(0, wrapper.broadcasts), buffer, len(wrapper.ranks))

    def end_forward(self, module: Module, name: str | None, *, steps: int) -> None:
        """Handle the end of a module's forward, and compare the params that it used."""
        if isinstance(module, DistributedDataParallel):
            wrapper = self._wrapper(module)
            # All params, because attention uses its projection's params without calling it.
            for full, param in module.module.named_parameters():
                if id(param) in wrapper.params:
                    self._compare_wrapped(wrapper, plain_name(full), param)
            wrapper.trains = wrapper.broadcasts_now = False
        if not self._trains:
            return
        # Wrapped params are declared replicas. Compare all others by name or placement.
        wrapper, inner = self._wrapped.get(id(module), (None, ""))
        for each, param in module._parameters.items():
            if param is None:
                continue
            if wrapper is not None and id(param) in wrapper.params:
                self._compare_wrapped(wrapper, f"{inner}.{each}".lstrip("."), param)
            elif name is not None:
                mesh, held = self._sharded.get((id(module), each), (None, id(param)))
                # Use the rank's steps if the optimizer has other objects, as with FSDP's flat
                # params.
                index = ValueIndex(self._steps[held] or steps)
                self._compare_placed(f"{name}.{each}".lstrip("."), param, index, mesh)

    def end_step(self, optimizer: Any) -> None:
        """Count an outermost `Optimizer.step`."""
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        self._steps.update(held)
        for wrapper in self._wrappers:
            if held & wrapper.params:
                # The excuse in the next forwards depends on reductions before this step.
                wrapper.reduced_before_step, wrapper.reduced = wrapper.reduced, False

    def _wrapper(self, module: Any) -> _Wrapper:
        for each in self._wrappers:
            # Compare identity, because modules may define equality.
            if each.module is module:
                return each
        # The first wrapper has no number, because most scripts have no other.
        number = f" {len(self._wrappers) + 1}" if self._wrappers else ""
        ignored = set(module.parameters_to_ignore)
        params = frozenset(
            id(param) for name, param in module.module.named_parameters() if name not in ignored
        )
        ranks = tuple(dist.get_process_group_ranks(module.process_group))
        made = _Wrapper(module, f"DistributedDataParallel{number}", params, ranks)
        self._wrappers.append(made)
        for name, each in module.module.named_modules():
            self._wrapped[id(each)] = made, plain_name(name)
        return made

    def _compare_wrapped(self, wrapper: _Wrapper, name: str, param: Tensor) -> None:
        # With `Join`, ranks use their params for different numbers of batches.
        if not wrapper.trains or wrapper.joined or not _is_plain(param):
            return
        # See [Note: the index of a value]: forwards only count without an optimizer.
        own = self._steps[id(param)]
        index = ValueIndex(own, 0 if own else wrapper.reducing_forwards)
        key = wrapper.key(name, param)
        self._compare(key, index, param, len(wrapper.ranks), excuse=wrapper.excuse)

    def _compare_placed(self, name: str, param: Tensor, index: ValueIndex, mesh: Any) -> None:
        """Compare DTensors by placements, FSDP's unsharded params by mesh, others by name."""
        if not isinstance(param, DTensor):
            declared, place = ("", ()) if mesh is None else ("DTensor", _ranks(mesh))
            if _is_plain(param):
                key = ReplicaKey(declared, name, tuple(param.shape), place)
                self._compare(key, index, param, len(place) or None)
            return
        mesh, local, placements = param.device_mesh, param.to_local(), param.placements
        coordinates = mesh.get_coordinate()
        # This rank is not in the mesh, or only has a summand of the value.
        if coordinates is None or any(each.is_partial() for each in placements):
            return
        # Mesh dimensions, not tensor dimensions.
        shards = [index for index, each in enumerate(placements) if not each.is_replicate()]
        # Number of ranks with the same shard.
        count = mesh.size() // math.prod(mesh.size(dim) for dim in shards)
        if count > 1 and _is_plain(local):
            place = (*_ranks(mesh), *(coordinates[dim] for dim in shards))
            key = ReplicaKey("DTensor", name, tuple(local.shape), place)
            self._compare(key, index, local, count)

    def _compare(
        self,
        key: ReplicaKey,
        index: ValueIndex,
        tensor: Tensor,
        count: int | None = None,
        excuse: Callable[[], str] = str,
    ) -> None:
        # A module may run several times at the same index, for example if backward recomputes it.
        if self._latest.get(key) == index:
            return
        self._latest[key] = index
        count = count or self.world_size
        # Do not record the comparison's operations as the script's.
        with _disable_current_modes(), torch.no_grad():
            tensor = tensor.detach()
            self.check.compare(self.rank, key, index, tensor, count=count, excuse=excuse())


def _ranks(mesh: Any) -> tuple[int, ...]:
    return tuple(mesh.mesh.reshape(-1).tolist())


def _is_plain(tensor: Tensor) -> bool:
    """Return True for a dense CPU tensor that has memory and is no functorch wrapper."""
    return (
        not has_own_dispatch(type(tensor))
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.numel() > 0
        and tensor.untyped_storage().nbytes() > 0
        and not tensor.is_quantized
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )
