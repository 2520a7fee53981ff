"""Resident memory of zero_sim's own system, found by following its references."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

from torch import Tensor, UntypedStorage, nn
from torch.optim import Optimizer

from zero_sim.zero import DistributedDataParallel, DistributedOptimizer
from zero_sim.zero.variants.arena import Arena
from zero_sim.zero.variants.grad_unit import GradUnit
from zero_sim.zero.variants.reduce_buffers import BufferedGrads

_OWN_MODULES = "zero_sim.zero"
_LASTING = ("gradients", "sums", "params", "masters", "arena")
_WITHIN_STEP = ("whole_gradients", "gathered")


def held_bytes(
    ddp: DistributedDataParallel, optimizer: DistributedOptimizer, *, arena: Arena | None = None
) -> Mapping[str, int]:
    """Return the bytes of all memory that an engine can reach, by purpose.

    Each storage counts once. The module's own tensors and scalars do not count.
    """
    # Unnamed memory counts as `other`. If a later change keeps memory alive, it appears there.
    named: dict[int, str] = {}
    for name, memory in memory_of(ddp, optimizer, arena=arena):
        # At stage 0 a param is in the module's own memory, which does not count.
        if name not in _WITHIN_STEP and not isinstance(memory, nn.Parameter):
            named.setdefault(_address(memory), name if name in _LASTING else "state")
    own = {_address(tensor) for tensor in ddp.module.buffers()}
    # A sharded param that is not in use is a placeholder of one element. If it is larger, it was
    # not resharded, so it counts.
    freed = {param for each in ddp.buffers if each.sharding.params for param in each.memory}
    own |= {
        _address(param)
        for param in ddp.module.parameters()
        if param not in freed or param.untyped_storage().nbytes() <= param.element_size()
    }
    held = dict.fromkeys((*_LASTING, "state", "other"), 0)
    # Storage addresses, because views share a storage.
    seen: set[int] = set()
    for tensor, storage in _tensors([ddp, optimizer]):
        address = storage.data_ptr()
        if address in seen:
            continue
        name = named.get(address)
        is_scalar = not tensor.dim()
        if name is None and (is_scalar or address in own):
            continue
        seen.add(address)
        # Counters are 0-D and do not grow with the model.
        if not (is_scalar and name == "state"):
            held[name or "other"] += storage.nbytes()
    return held


def memory_of(
    ddp: DistributedDataParallel, optimizer: DistributedOptimizer, *, arena: Arena | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield all named memory that exists now.

    Returns:
        Lasting memory: `gradients`, their `sums`, `params`, `masters`, states under torch's names,
        and the `arena`. Temporary memory in stages 2 and 3: `whole_gradients` and `gathered`
        params.
    """
    for buffer in ddp.buffers:
        lasting = (
            ("gradients", buffer.grad_data),
            ("sums", buffer.total_data),
            ("params", buffer.param_data),
            ("params", buffer.shard_data),
        )
        yield from ((name, memory) for name, memory in lasting if memory is not None)
        for unit in buffer.units:
            whole = unit.grad_storage.whole if unit.frees_grads else None
            if whole is not None:
                yield "whole_gradients", whole
            # A unit without its own storage has its params in the module's memory.
            if unit.param_storage is None:
                yield from (("params", member.param) for member in unit.members)
            elif unit.frees_params and unit.params is not None:
                yield "gathered", unit.params
    units, shared = _reduce_buffers(ddp)
    yield from (("whole_gradients", memory) for memory in shared)
    for grad_unit in units:
        if grad_unit.storage.whole is not None:
            yield "whole_gradients", grad_unit.storage.whole
        # Without `grads_stay`, gradients are in `.grad` until they are copied into a reduce buffer.
        for param in () if grad_unit.grads_stay else grad_unit.params:
            if param.grad is not None:
                yield "whole_gradients", param.grad
    if arena is not None:
        yield "arena", arena.memory
    yield from (("masters", shard) for shard in optimizer.master_shards.values())
    for state in optimizer.inner.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                yield str(name), value


def whole_bytes(
    ddp: DistributedDataParallel, *, arena: Arena | None = None
) -> Iterator[tuple[str, str, int]]:
    """Return the unsharded memory of sharded units.

    Returns:
        Tuples as in `PeakEngine.whole_bytes`.
    """
    # Measure storages, params and gradients, because a unit's recorded state may be wrong.
    units, shared = _reduce_buffers(ddp)
    for grad_unit in units:
        held: list[object] = list(vars(grad_unit.storage).values())
        if not grad_unit.grads_stay:
            held += [param.grad for param in grad_unit.params]
        yield "gradients", grad_unit.slices[0].memory.name, _bytes_of(held)
    if units:
        yield "reduce buffers", units[0].slices[0].memory.name, _bytes_of(shared)
    for buffer in ddp.buffers:
        for unit in buffer.units:
            if not (unit.frees_grads or unit.frees_params):
                continue
            name = next(member.name for member in unit.members if member.param.numel())
            params = [member.param for member in unit.members]
            if unit.frees_grads:
                grads = [getattr(param, "main_grad", None) for param in params]
                grads += [member.main_grad for member in unit.members]
                grads += vars(unit.grad_storage).values()
                if arena is None:
                    yield "gradients", name, _bytes_of(grads)
                else:
                    # Gradients in the arena share its storage, so measure their ranges.
                    inside = _within(arena, grads)
                    outside = _bytes_of(g for g in grads if not _is_in(arena, g))
                    yield "gradients", name, inside + outside
                    yield "gradients outside the arena", name, outside
            if unit.frees_params:
                assert unit.param_storage is not None
                # A sharded param is a placeholder of one element.
                there = [param for param in params if not _is_placeholder(param)]
                yield "params", name, _bytes_of([*there, *vars(unit.param_storage).values()])


def _reduce_buffers(
    ddp: DistributedDataParallel,
) -> tuple[Sequence[GradUnit], Sequence[Tensor]]:
    schedule = ddp.grad_schedule
    if not isinstance(schedule, BufferedGrads):
        return (), ()
    return schedule.buffers.units, schedule.buffers.memory


def _is_in(arena: Arena, item: object) -> bool:
    return isinstance(item, Tensor) and _address(item) == _address(arena.memory)


def _within(arena: Arena, items: Iterable[object]) -> int:
    """Return how many bytes of an arena its tensors cover."""
    # Sorted by start, so a single pass merges overlapping ranges.
    ends = sorted(
        (item.data_ptr(), item.data_ptr() + item.nbytes)
        for item in items
        if isinstance(item, Tensor) and _is_in(arena, item)
    )
    covered = reached = 0
    for start, stop in ends:
        covered += max(0, stop - max(start, reached))
        reached = max(reached, stop)
    return covered


def _is_placeholder(param: Tensor) -> bool:
    return param.untyped_storage().nbytes() == param.element_size()


def _bytes_of(items: Iterable[object]) -> int:
    """Return the bytes in the storages of all tensors among the items, each storage once."""
    found: dict[int, int] = {}
    for item in items:
        # Most items are None, and `isinstance` with Tensor is slow.
        if item is not None and isinstance(item, Tensor):
            storage = item.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(roots: list[object]) -> Iterator[tuple[Tensor, UntypedStorage]]:
    """Yield all tensors that can be reached, except through the module or torch objects."""
    # A stack, because references may be too deep for recursion. `seen` also breaks cycles.
    pending, seen = list(roots), set[int]()
    while pending:
        item = pending.pop()
        members = _members_of(type(item))
        if members is None or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            storage = item.untyped_storage()
            # Freed storages have no bytes.
            if storage.nbytes():
                yield item, storage
        pending.extend(members(item))


@cache
def _members_of(cls: type) -> Callable[[Any], Iterable[object]] | None:
    """Return a function from a class's object to its references; None if they are not followed."""
    # Cached by class, because there are many thousands of objects, mostly numbers and names.
    members: Callable[[Any], Iterable[object]] | None = None
    if issubclass(cls, nn.Module):
        return None
    if issubclass(cls, Tensor):
        members = _grad
    elif issubclass(cls, dict):
        members = _items
    elif issubclass(cls, list | tuple | set | frozenset):
        members = _entries
    elif issubclass(cls, Optimizer):
        members = _of_optimizer
    elif issubclass(cls, partial):
        members = _arguments
    # Includes derived classes outside `zero_sim.zero`, such as combined units in `targets.own`.
    elif any(base.__module__.startswith(_OWN_MODULES) for base in cls.__mro__):
        slots = tuple(slot for base in cls.__mro__ for slot in getattr(base, "__slots__", ()))
        members = partial(_attributes, slots)
    return members


def _grad(tensor: Tensor) -> Iterable[object]:
    return (tensor.grad,)


def _entries(entries: Iterable[object]) -> Iterable[object]:
    return entries


def _items(mapping: dict[object, object]) -> Iterable[object]:
    return (*mapping, *mapping.values())


def _of_optimizer(optimizer: Optimizer) -> Iterable[object]:
    return (optimizer.state, optimizer.param_groups)


def _arguments(call: partial[object]) -> Iterable[object]:
    return call.args


def _attributes(slots: tuple[str, ...], item: object) -> Iterable[object]:
    held = [getattr(item, slot, None) for slot in slots]
    held.extend(getattr(item, "__dict__", {}).values())
    return held
