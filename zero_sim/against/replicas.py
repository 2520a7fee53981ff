"""Compares tensors that should be replicas among the ranks of one run, as forwards use them.

Params of DistributedDataParallel, buffers that it broadcasts, and DTensors with replicated
placements are declared to be replicas. Other tensors of equal name and shape are only suspected to
be: experts and personal layers may differ rightly.

[Note: as the next forward uses them]
Between `Optimizer.step` and the gather of its results replicas may differ rightly, so they are
compared when a forward with gradients uses them. An evaluation may swap in averaged weights.

[Note: the index of a value]
Ranks reach the same forward at different times, and may call different numbers of forwards. So the
values compared are those of the first forward after the same number of optimizer steps on the
tensor itself. Without an optimizer, forwards whose backward reduces gradients are counted instead.

[Note: steps of a rank's own]
Local SGD steps on purpose without a reduction. If no rank's DistributedDataParallel reduced
gradients before a step, the difference after it is a warning; if some rank's did, a finding.
"""

from __future__ import annotations

import fnmatch
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

from zero_sim.against.points import plain_name
from zero_sim.sim.dispatch import has_own_dispatch

KEPT_BYTES = 1 << 30
"""Memory of values that wait for other ranks. Beyond it the oldest are dropped, uncompared."""
_LOCAL_HOOKS = ("post_localSGD_hook", "noop_hook")
_KNOWN_HOOKS = "torch.distributed.algorithms"


class _Key(NamedTuple):
    """A tensor that several ranks have."""

    declared: str
    """What declares it to be a replica, such as `DistributedDataParallel`; empty for nothing."""
    name: str
    shape: tuple[int, ...]
    place: tuple[object, ...] = ()
    """World ranks of its group or mesh, and coordinates on mesh dimensions that shard it."""


class _Index(NamedTuple):
    """When a value was used; see [Note: the index of a value]."""

    steps: int
    """Optimizer steps on the tensor."""
    forwards: int = 0
    """Forwards that reduce gradients, if no optimizer has stepped on the tensor."""

    @property
    def text(self) -> str:
        """The time in words."""
        if self.forwards > 1:
            return f"as forward {self.forwards} used it"
        return f"as the first forward{f' after step {self.steps}' if self.steps else ''} used it"


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift:
    """The first difference between two ranks' values of one tensor."""

    name: str
    declared: str
    """What declares it to be a replica; empty for nothing."""
    excuse: str
    """Why it may differ rightly; empty for a finding."""
    when: str
    steps: int
    """Optimizer steps on the tensor before it."""
    ranks: tuple[int, int]
    """The first two ranks that were found to differ, the lower first."""
    differ_count: int
    elems: int
    element: int
    """The first flat element that differs."""
    values: tuple[float, float]
    """The element's values on the two ranks."""

    @property
    def text(self) -> str:
        """The difference in words."""
        of = f" of {self.declared}" if self.declared else ""
        one, other = self.ranks
        return (
            f"{self.name}{of}, {self.when}\n"
            f"  {self.differ_count:,} of {self.elems:,} elements differ; element {self.element}: "
            f"rank {one} has {self.values[0]:.9g}, rank {other} has {self.values[1]:.9g}"
        )


@dataclass(slots=True)
class _Entry:
    """A value that waits for other ranks."""

    rank: int
    values: Tensor
    excuse: str
    ranks: set[int]


class ReplicaCheck:
    """Compares the tensors of all ranks of one run.

    Args:
        world_size: Number of ranks.
        allowed: Patterns of names that may differ, as of `fnmatch`.
    """

    def __init__(self, *, world_size: int, allowed: Sequence[str] = ()) -> None:
        self.world_size = world_size
        self.findings: list[Drift] = []
        """Declared replicas that differ, in the order in which they were found."""
        self.warnings: list[Drift] = []
        """Tensors that drift apart, and may do so rightly."""
        self.compared: set[_Key] = set()
        """Declared replicas that were equal on all their ranks at least once."""
        self._allowed = tuple(allowed)
        self._agreed: set[_Key] = set()
        self._done: set[_Key] = set()
        self._entries: OrderedDict[tuple[_Key, _Index], _Entry] = OrderedDict()
        self._bytes = 0

    def compare(
        self, rank: int, key: _Key, index: _Index, tensor: Tensor, *, count: int, excuse: str
    ) -> None:
        """Compare a rank's value with that of the first rank that had it.

        Args:
            rank: World rank.
            key: The tensor.
            index: When it is used.
            tensor: Its value.
            count: Number of ranks that have it.
            excuse: Why it may differ from other ranks' rightly; empty for no reason.
        """
        if key in self._done:
            return
        entry = self._entries.get((key, index))
        if entry is None:
            self._keep(key, index, _Entry(rank, tensor.clone(), excuse, {rank}))
            return
        entry.ranks.add(rank)
        if not _same(entry.values, tensor):
            self._done.add(key)
            if key.declared or key in self._agreed:
                # One rank that reduced gradients shows that the step was to be common.
                self._differ(rank, key, index, tensor, entry, excuse=entry.excuse and excuse)
        elif len(entry.ranks) == count:
            if key.declared:
                self.compared.add(key)
            # Zeros and ones are equal on ranks that have different shards, too.
            elif key not in self._agreed and not _is_constant(tensor):
                self._agreed.add(key)
            self._drop((key, index))

    def _keep(self, key: _Key, index: _Index, entry: _Entry) -> None:
        self._entries[key, index] = entry
        self._bytes += entry.values.nbytes
        while self._bytes > KEPT_BYTES and len(self._entries) > 1:
            self._drop(next(iter(self._entries)))

    def _drop(self, place: tuple[_Key, _Index]) -> None:
        self._bytes -= self._entries.pop(place).values.nbytes

    def _differ(
        self, rank: int, key: _Key, index: _Index, tensor: Tensor, entry: _Entry, *, excuse: str
    ) -> None:
        if any(fnmatch.fnmatchcase(key.name, pattern) for pattern in self._allowed):
            return
        one, other = entry.values.reshape(-1), tensor.detach().reshape(-1)
        differs = (one != other) & ~(one.isnan() & other.isnan())
        element = int(differs.nonzero()[0])
        if not key.declared:
            excuse = "nothing declares it to be a replica"
        (low, of_low), (high, of_high) = sorted(
            ((entry.rank, _number(one[element])), (rank, _number(other[element])))
        )
        drift = Drift(
            name=key.name,
            declared=key.declared,
            excuse=excuse,
            when=index.text,
            steps=index.steps,
            ranks=(low, high),
            differ_count=int(differs.sum()),
            elems=one.numel(),
            element=element,
            values=(of_low, of_high),
        )
        (self.warnings if excuse else self.findings).append(drift)

    @property
    def finding(self) -> str:
        """The finding in words; empty for none."""
        if not self.findings:
            return ""
        first, *others = self.findings
        lines = [f"replicas differ: {first.text}", *_listed(others)]
        lines.append(
            "  Let all ranks step on the same gradients and params. If they differ on purpose, "
            f"name them: --allow-drift '{first.name}'."
        )
        return "\n".join(lines)

    @property
    def warning(self) -> str:
        """The tensors that drift apart and may do so rightly, in words; empty for none."""
        if not self.warnings:
            return ""
        first, *others = self.warnings
        lines = [f"equal on all ranks at first, then not: {first.text}", *_listed(others)]
        lines.append(
            f"  This may be right, since {first.excuse}. Then name it: --allow-drift "
            f"'{first.name}'."
        )
        return "\n".join(lines)


def _listed(others: Sequence[Drift]) -> list[str]:
    if not others:
        return []
    more = f", and {len(others) - 3} more" if len(others) > 3 else ""
    return [f"  so do {', '.join(each.name for each in others[:3])}{more}"]


def _same(one: Tensor, other: Tensor) -> bool:
    if torch.equal(one, other):
        return True
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _is_constant(tensor: Tensor) -> bool:
    return not tensor.numel() or bool((tensor == tensor.reshape(-1)[0]).all())


def _number(element: Tensor) -> float:
    return element.abs().item() if element.is_complex() else float(element.item())


@dataclass(slots=True, eq=False)
class _Wrapper:
    """One rank's DistributedDataParallel."""

    module: Any
    label: str
    params: frozenset[int] = frozenset()
    """Their ids."""
    trains: bool = False
    """True within its forward with gradients."""
    reducing_forwards: int = 0
    broadcasts: int = 0
    broadcasts_now: bool = False
    reduced: bool = False
    """True if a forward since the last step reduces gradients."""
    reduced_before_step: bool = True
    joined: bool = False
    """True once its ranks may read different numbers of batches."""

    def begin_forward(self, *, trains: bool) -> None:
        """Read its state before its forward."""
        module = self.module
        self.trains = trains
        self.joined |= module._join_config.enable
        self.broadcasts_now = bool(module._check_sync_bufs_pre_fwd())
        self.broadcasts += self.broadcasts_now
        if self.trains and module.require_backward_grad_sync:
            self.reduced = True
            self.reducing_forwards += 1

    def excuse(self) -> str:
        """Why ranks' params may differ rightly; empty for no reason."""
        for hook, _ in self.module._comm_hooks:
            name = getattr(hook, "__qualname__", type(hook).__name__)
            known = getattr(hook, "__module__", "").startswith(_KNOWN_HOOKS)
            if name in _LOCAL_HOOKS or not known:
                return f"{self.label} has the communication hook {name}"
        if not self.reduced_before_step:
            return f"no backward of {self.label} reduced gradients before this step"
        return ""


@dataclass(slots=True)
class RankReplicas:
    """Finds the replicas of one rank and hands them to the check as forwards use them."""

    rank: int
    check: ReplicaCheck
    _wrappers: list[_Wrapper] = field(default_factory=list)
    _wrapped: dict[int, tuple[_Wrapper, str]] = field(default_factory=dict)
    """The wrapper of each module that one contains, and the module's name in it."""
    _meshes: dict[tuple[int, str], Any] = field(default_factory=dict)
    """Meshes of DTensors that FSDP replaces by plain tensors in forwards, by module and name."""
    _steps: Counter[int] = field(default_factory=Counter)
    """Optimizer steps on each tensor, by id."""
    _latest: dict[_Key, _Index] = field(default_factory=dict)
    _trains: bool = False

    def begin_outermost(self, root: Module, *, trains: bool) -> None:
        """Before a forward that no other contains.

        Args:
            root: Its module.
            trains: True if gradients are enabled.
        """
        self._trains = trains
        if not trains:
            return
        for module in root.modules():
            for name, param in module._parameters.items():
                if hasattr(param, "placements"):
                    self._meshes[id(module), name] = param.device_mesh

    def begin_forward(self, module: Module, name: str | None, *, steps: int, trains: bool) -> None:
        """Before each forward; compares buffers, which a forward may change.

        Args:
            module: The module.
            name: Its name, or None if it has none.
            steps: Optimizer steps of the rank so far.
            trains: True if gradients are enabled.
        """
        if isinstance(module, DistributedDataParallel):
            self._wrapper(module).begin_forward(trains=trains)
        if not self._trains or not module._buffers:
            return
        wrapper, inner = self._wrapped.get(id(module), (None, ""))
        if wrapper is not None:
            if not wrapper.broadcasts_now:
                return
            index = _Index(0, wrapper.broadcasts)
        elif name is None or isinstance(module, _NormBase):
            return  # Statistics of a rank's own rows.
        else:
            index = _Index(steps)
        label = wrapper.label if wrapper else ""
        group = _members(wrapper.module) if wrapper else ()
        for each, buffer in _plain(module._buffers):
            full = f"{inner if wrapper else name}.{each}".lstrip(".")
            key = _Key(label, full, tuple(buffer.shape), group)
            self._compare(key, index, buffer, count=len(group) or None)

    def end_forward(self, module: Module, name: str | None, *, steps: int) -> None:
        """After each forward; compares the params that it used."""
        if isinstance(module, DistributedDataParallel):
            wrapper = self._wrapper(module)
            wrapper.trains = wrapper.broadcasts_now = False
        if not self._trains:
            return
        wrapper, inner = self._wrapped.get(id(module), (None, ""))
        for each, param in module._parameters.items():
            if param is None:
                continue
            if wrapper is not None and id(param) in wrapper.params:
                self._compare_wrapped(wrapper, f"{inner}.{each}".lstrip("."), param)
            elif name is not None:
                own = self._steps[id(param)]
                full = f"{name}.{each}".lstrip(".")
                mesh = self._meshes.get((id(module), each))
                self._compare_placed(full, param, _Index(own or steps), mesh)

    def end_step(self, optimizer: Any) -> None:
        """After each `Optimizer.step` that no other contains."""
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        self._steps.update(held)
        for wrapper in self._wrappers:
            if held & wrapper.params:
                wrapper.reduced_before_step, wrapper.reduced = wrapper.reduced, False

    def _wrapper(self, module: Any) -> _Wrapper:
        for each in self._wrappers:
            if each.module is module:
                return each
        number = f" {len(self._wrappers) + 1}" if self._wrappers else ""
        ignored = set(module.parameters_to_ignore)
        params = frozenset(
            id(param) for name, param in module.module.named_parameters() if name not in ignored
        )
        made = _Wrapper(module, f"DistributedDataParallel{number}", params)
        self._wrappers.append(made)
        for name, each in module.module.named_modules():
            self._wrapped[id(each)] = made, plain_name(name)
        return made

    def _compare_wrapped(self, wrapper: _Wrapper, name: str, param: Tensor) -> None:
        if not wrapper.trains or wrapper.joined or not _is_plain(param):
            return
        own = self._steps[id(param)]
        index = _Index(own) if own else _Index(0, wrapper.reducing_forwards)
        group = _members(wrapper.module)
        key = _Key(wrapper.label, name, tuple(param.shape), group)
        self._compare(key, index, param, count=len(group), excuse=wrapper.excuse)

    def _compare_placed(self, name: str, param: Tensor, index: _Index, mesh: Any) -> None:
        """A DTensor by its placements; a plain tensor by its name, or FSDP's unsharded param."""
        placements = getattr(param, "placements", None)
        if placements is None:
            if _is_plain(param):
                key = _Key("", name, tuple(param.shape))
                if mesh is not None:
                    key = key._replace(declared="DTensor", place=_ranks(mesh))
                self._compare(key, index, param, count=mesh.size() if mesh is not None else None)
            return
        mesh, local = param.device_mesh, param.to_local()
        coordinates = mesh.get_coordinate()
        if coordinates is None or any(each.is_partial() for each in placements):
            return
        shards = [index for index, each in enumerate(placements) if not each.is_replicate()]
        count = mesh.size()
        for dim in shards:
            count //= mesh.size(dim)
        if count > 1 and _is_plain(local):
            place = (*_ranks(mesh), *(coordinates[dim] for dim in shards))
            self._compare(_Key("DTensor", name, tuple(local.shape), place), index, local, count)

    def _compare(
        self,
        key: _Key,
        index: _Index,
        tensor: Tensor,
        count: int | None = None,
        excuse: Callable[[], str] = str,
    ) -> None:
        if self._latest.get(key) == index:
            return
        self._latest[key] = index
        with _disable_current_modes(), torch.no_grad():
            self.check.compare(
                self.rank,
                key,
                index,
                tensor.detach(),
                count=count or self.check.world_size,
                excuse=excuse(),
            )


def _members(module: Any) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(module.process_group))


def _ranks(mesh: Any) -> tuple[int, ...]:
    return tuple(mesh.mesh.reshape(-1).tolist())


def _plain(tensors: Mapping[str, Tensor | None]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        if tensor is not None and _is_plain(tensor):
            yield name, tensor


def _is_plain(tensor: Tensor) -> bool:
    """True for a dense tensor with memory, and none that a transformation of torch stands for."""
    return (
        not has_own_dispatch(type(tensor))
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.numel() > 0
        and tensor.untyped_storage().nbytes() > 0
        and not tensor.is_quantized
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )
