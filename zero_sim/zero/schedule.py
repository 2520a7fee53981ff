"""Schedules: when units are reduced, and when their params are gathered.

[Note: one order for all ranks]
Ranks meet in collectives by the order in which each issues them. Gradients arrive in an order that
differs between ranks, as soon as they differ in which params they use, and on some ranks never. So
a unit that is ready still waits for all before it in one fixed order, which follows from the
layout alone; what never became ready is issued at the end, in that order too.

[Note: one order of gathers and reductions]
Where params are gathered under backward, too, reductions that wait for gradients would come between
different gathers on ranks whose gradients differ. There a unit is ready when backward has come past
every module that uses it, which is at the same point on all ranks that call the same modules in the
same order: autograd evaluates nodes in the reverse order of their making. Ranks must do that, as
with any engine that gathers params on use.

Ranks that hold other experts may have more units of these, or fewer, between those that all have.
So what is counted in units, how far is gathered ahead and which one is kept, is counted among those
of one group of ranks; and a reduction that ends with another call in its group, as a sum at the
first rank does, ends before a gather in that group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from zero_sim.errors import ModelError, UsageError
from zero_sim.zero.buffer import Buffer
from zero_sim.zero.collectives import sum_at_first
from zero_sim.zero.config import ZeroConfig
from zero_sim.zero.hooks import find_users, on_gradients_of
from zero_sim.zero.unit import ParamState, Unit
from zero_sim.zero.variants.grad_unit import GradUnit

ReducedUnit = Unit | GradUnit
"""What is reduced as one: the bucket of some params, or a part of their gradients."""


def order_by_forward(
    buffers: Sequence[Buffer], *, params: Sequence[nn.Parameter]
) -> tuple[Unit, ...]:
    """Return the units in the order in which a forward is expected to need them.

    That of their first registered param, whatever the order of params inside a buffer; reversed it
    is the order in which backward is expected to complete them.

    Args:
        buffers: All buffers of a model.
        params: Their params in registration order.
    """
    place_of = {param: place for place, param in enumerate(params)}
    first_place: dict[Unit, int] = {}
    for buffer in buffers:
        for param in buffer.memory:
            unit = buffer.unit_of(param)
            if unit is not None:
                first_place[unit] = min(place_of[param], first_place.get(unit, len(params)))
    return tuple(sorted(first_place, key=first_place.__getitem__))


class Schedules(NamedTuple):
    """The schedules of one model; None for what its config does not ask for."""

    grads: UnderBackward | None
    params: UnderForward | None
    on_use: OnUse | None


def build_schedules(
    module: nn.Module,
    *,
    config: ZeroConfig,
    units: Sequence[Unit],
    unit_of: Mapping[nn.Parameter, Unit],
    grad_units: Sequence[GradUnit],
    grad_unit_of: Mapping[nn.Parameter, GradUnit] | None,
    before_sum: Callable[[ReducedUnit], None],
) -> Schedules:
    """Build the schedules that a config asks for.

    Args:
        module: The whole model.
        config: What is overlapped and sharded.
        units: All units, in the order in which a forward is expected to need them.
        unit_of: The unit of each param that has elements.
        grad_units: What is reduced in their place, in this order; none without reduce buffers.
        grad_unit_of: The grad unit of each such param; None without reduce buffers.
        before_sum: Called with what is reduced right before it is issued.
    """
    grads = params = on_use = None
    sharding = config.sharding
    if config.overlap_grads or sharding.grads or grad_unit_of is not None:
        grads = UnderBackward(
            grad_units or units[::-1],
            unit_of=unit_of if grad_unit_of is None else grad_unit_of,
            before_sum=before_sum,
            by_arrival=not sharding.params,
            is_async=config.overlap_grads,
        )
    if config.overlap_params:
        params = UnderForward(module, units=units, unit_of=unit_of)
    if sharding.params:
        assert grads is not None
        on_use = OnUse(
            module,
            units=units,
            unit_of=unit_of,
            prefetch=config.prefetch,
            reshard_after_forward=config.reshard_after_forward,
            grads=grads,
        )
    return Schedules(grads, params, on_use)


class UnderBackward:
    """Reduces each unit as soon as it is ready; see [Note: one order for all ranks].

    Of grad units the first that is not issued takes gradients as they come; others wait for their
    turn where autograd left them, as the memory into which they go is another one's.

    Args:
        units: All units, in the order in which they are to be issued.
        unit_of: The unit of each param that has elements.
        before_sum: Called with a unit right before it is issued.
        by_arrival: Whether a unit is ready once its gradients are there; else once it is closed,
            see [Note: one order of gathers and reductions].
        is_async: Whether a reduction goes on while backward does.
    """

    def __init__(
        self,
        units: Sequence[ReducedUnit],
        *,
        unit_of: Mapping[nn.Parameter, ReducedUnit],
        before_sum: Callable[[ReducedUnit], None],
        by_arrival: bool = True,
        is_async: bool = True,
    ) -> None:
        self._units = units
        self._unit_of = unit_of
        self._before_sum = before_sum
        self._by_arrival = by_arrival
        self._is_async = is_async
        self._missing: dict[ReducedUnit, set[nn.Parameter]] = {}
        self._issued_count = 0
        self._issued: set[ReducedUnit] = set()
        self.running = False

    def begin(self) -> None:
        """Issue units from now on; to be called before the backward that completes them."""
        self._missing = {unit: set() for unit in self._units}
        for param, unit in self._unit_of.items():
            # A param that is frozen now gets no gradient and nobody has to wait for it.
            if param.requires_grad or not self._by_arrival:
                self._missing[unit].add(param)
        self.running = True
        self._issue_ready()

    def check_open(self, param: nn.Parameter, *, name: str) -> None:
        """Refuse a gradient whose unit is on its way already.

        Raises:
            UsageError: If the unit was issued.
        """
        if self.running and self._unit_of.get(param) in self._issued:
            raise UsageError(
                f"expected one gradient of {name!r} in the last micro-batch, got another one "
                f"after its bucket was sent. Try one backward between begin_last_micro_batch() and "
                f"end_micro_batch(), or overlap_grads=False."
            )

    def mark_ready(self, param: nn.Parameter) -> None:
        """Note that a gradient is complete, and issue what became ready by it."""
        unit = self._unit_of.get(param)
        if self.running and self._by_arrival and unit is not None:
            self._missing[unit].discard(param)
            if unit is self._units[self._issued_count]:
                unit.arrive(param)
            self._issue_ready()

    def close(self, unit: Unit) -> None:
        """Note that no further gradient of a unit comes, and issue what became ready by it."""
        if self.running:
            self._missing[unit].clear()
            self._issue_ready()

    def end_sum_in(self, group: dist.ProcessGroup | None) -> None:
        """Wait for a reduction that has yet to make a call in a group, before others are made."""
        if self._issued_count:
            last = self._units[self._issued_count - 1]
            is_sent_back = isinstance(last, Unit) and last.sum_all is sum_at_first
            if is_sent_back and last.group is group:
                last.finish_reduce()

    def finish(self) -> None:
        """Issue the rest and wait until every unit is reduced."""
        while self._issued_count < len(self._units):
            self._issue_next()
        # Second sums are issued together, in order too, so that they overlap each other.
        for unit in self._units:
            unit.chain_reduce()
        for unit in self._units:
            unit.finish_reduce()
        self._issued_count = 0
        self._issued.clear()
        self.running = False

    def _issue_ready(self) -> None:
        while self._issued_count < len(self._units):
            if self._missing[self._units[self._issued_count]]:
                return
            self._issue_next()

    def _issue_next(self) -> None:
        unit = self._units[self._issued_count]
        if unit.frees_grads and self._issued_count:
            # One in flight, one that fills: more whole gradients are never in memory.
            self._units[self._issued_count - 1].finish_reduce()
        unit.fill()
        self._before_sum(unit)
        if self._is_async:
            unit.start_reduce()
        else:
            unit.reduce()
        self._issued.add(unit)
        self._issued_count += 1
        if self._issued_count < len(self._units):
            following = self._units[self._issued_count]
            for param in following.params if isinstance(following, GradUnit) else ():
                if self.running and param not in self._missing[following]:
                    following.arrive(param)


class UnderForward:
    """Gathers all units in the background, each waited for before a module uses it.

    Args:
        module: The whole model; hooks are put on its modules.
        units: All units, in the order in which they are to be issued.
        unit_of: The unit of each param that has elements.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        units: Sequence[Unit],
        unit_of: Mapping[nn.Parameter, Unit],
    ) -> None:
        self._units = units
        self._unit_of = unit_of
        self.handles: list[RemovableHandle] = []
        users = find_users(module)
        for user, params in users.items():
            needed = {unit_of[param]: None for param in params if param in unit_of}
            if user is not None and needed:
                hook = partial(self._before_forward, tuple(needed))
                self.handles.append(user.register_forward_pre_hook(hook))
        # Nothing tells when these are used, so that they are never left in flight.
        self._unguarded = {unit_of[param] for param in users.get(None, ()) if param in unit_of}

    def start(self) -> None:
        """Issue the gathers."""
        for unit in self._units:
            unit.start_gather()
        for unit in self._units:
            if unit in self._unguarded:
                unit.finish_gather()

    def finish(self) -> None:
        """Wait for all gathers."""
        for unit in self._units:
            unit.finish_gather()

    def check_waited(self, param: nn.Parameter, *, name: str) -> None:
        """Refuse a gradient of a param that nobody waited for: forward read an old value.

        Raises:
            ModelError: If the gather of the param is still in flight.
        """
        unit = self._unit_of.get(param)
        if unit is not None and unit.gathering:
            raise ModelError(
                f"expected {name!r} to be used by the forward of a module that it belongs to, "
                f"got a gradient of it although no such forward waited for its gather. "
                f"Try finish_param_gather() before forward, or overlap_params=False."
            )

    def _before_forward(self, needed: Sequence[Unit], module: nn.Module, args: object) -> None:
        for unit in needed:
            unit.finish_gather()


@dataclass(frozen=True, slots=True, eq=False)
class _Use:
    """One call of a module in a forward with gradients."""

    start: int
    stop: int
    """Half-open, in begins and ends of calls since the last micro-batch ended."""
    needed: tuple[Unit, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """What autograd keeps of a whole param, without keeping its memory."""

    unit: Unit
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class OnUse:
    """Params that are gathered before a module uses them, and freed when no module does.

    In a forward a unit is freed once every module that uses it has run; the last one stays, as the
    backward begins with it, the last of each group of ranks. Backward gathers a unit before the
    first module that needs it, and frees it when it has come past the last. See [Note: one order of
    gathers and reductions].

    Args:
        module: The whole model; hooks are put on its modules.
        units: All units, in the order in which a forward is expected to need them.
        unit_of: The unit of each param that has elements.
        prefetch: How many further units of a group of ranks are gathered ahead, in both directions,
            when a module uses one.
        reshard_after_forward: Whether units are freed between a forward and its backward.
        grads: Reduces a unit when no further gradient of it comes.

    Raises:
        ModelError: If nothing tells when some params are used.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        units: Sequence[Unit],
        unit_of: Mapping[nn.Parameter, Unit],
        prefetch: int,
        reshard_after_forward: bool,
        grads: UnderBackward,
    ) -> None:
        self._units = tuple(units)
        self.handles: list[RemovableHandle] = []
        self._prefetch = prefetch
        self._grads = grads
        self._of_group: dict[dist.ProcessGroup | None, list[Unit]] = {}
        for unit in self._units:
            self._of_group.setdefault(unit.group, []).append(unit)
        last = [units[-1] for units in self._of_group.values()]
        self._kept = frozenset(last if reshard_after_forward else self._units)
        self._users: dict[Unit, set[nn.Module]] = {unit: set() for unit in units}
        self._pending: dict[Unit, set[nn.Module]] = {}
        self._in_use: Counter[Unit] = Counter()
        self._tick = 0
        self._starts: list[int] = []
        self._uses: list[_Use] = []
        self._first_use: dict[Unit, int] = {}
        self._in_backward = False
        self._saving: saved_tensors_hooks | None = None
        self._calls: list[tuple[nn.Module, tuple[Unit, ...], bool]] = []
        self._last_calls: list[tuple[nn.Module, tuple[Unit, ...], bool]] = []
        users = find_users(module)
        stray = [param for param in users.get(None, ()) if param in unit_of]
        if stray:
            raise ModelError(
                f"expected params below a module with a forward, before which they are gathered, "
                f"got {len(stray)} elsewhere in {type(module).__name__}. Try a forward for the "
                f"module that holds them, or a stage below 3."
            )
        users.setdefault(module, [])
        for user, params in users.items():
            if user is None:
                continue
            needed = tuple(dict.fromkeys(unit_of[param] for param in params if param in unit_of))
            if not needed and user is not module:
                continue
            for unit in needed:
                self._users[unit].add(user)
            before, after = (
                partial(f, needed) for f in (self._before_forward, self._after_forward)
            )
            self.handles.append(user.register_forward_pre_hook(before))
            # Also where the forward raises: its units are let go of all the same.
            self.handles.append(user.register_forward_hook(after, always_call=True))

    def repeat_forward(self) -> None:
        """Gather and free as the last micro-batch's forward did, without one, beside other ranks'.

        The end of backward then goes the way back through it.

        Raises:
            UsageError: If there was none.
        """
        if not self._last_calls:
            raise UsageError(
                "expected a micro-batch with a forward on this rank before it joins one without, "
                "since params are gathered in the order of the last one, got none. Try a first "
                "micro-batch on every rank, or a stage below 3."
            )
        with torch.enable_grad():
            for module, needed, begins in self._last_calls:
                if begins:
                    self._before_forward(needed, module, ())
                else:
                    self._after_forward(needed, module, (), None)

    def free_all(self) -> None:
        """Let go of all whole params: their owners have new values, or a step begins anew."""
        for unit in self._units:
            unit.finish_gather()
            if unit.param_state is ParamState.WHOLE:
                unit.free_params()

    def finish_backward(self) -> None:
        """Come to the end of backward, past every module that it did not reach on this rank."""
        self._unwind(len(self._uses))
        for unit in self._units[::-1]:
            self._end_gradients(unit)
        self._first_use.clear()
        self._last_calls, self._calls = self._calls or self._last_calls, []
        self._in_backward = False
        self._tick = 0
        self.free_all()

    def check_gathered(self, *, name: str, unit: Unit | None) -> None:
        """Refuse a gradient of a param that no module gathered: forward read no value of it.

        Raises:
            ModelError: If the params of its unit are not in memory.
        """
        if unit is not None and unit not in self._first_use:
            raise ModelError(
                f"expected {name!r} to be used by the forward of a module that it belongs to, "
                f"got a gradient of it although no such forward gathered it. Try to call that "
                f"module, or to register the param in the one that uses it."
            )

    def _before_forward(
        self, needed: tuple[Unit, ...], module: nn.Module, args: tuple[object, ...]
    ) -> None:
        if not self._starts and not self._in_backward:
            self._pending = {unit: set(users) for unit, users in self._users.items()}
            self._saving = saved_tensors_hooks(self._keep, self._restore)
            self._saving.__enter__()
        if torch.is_grad_enabled() and not self._in_backward:
            self._calls.append((module, needed, True))
        self._starts.append(self._tick)
        self._tick += 1
        self._in_use.update(needed)
        self._gather(needed, ahead=self._after_in_forward(needed))

    def _after_forward(
        self,
        needed: tuple[Unit, ...],
        module: nn.Module,
        args: tuple[object, ...],
        output: object,
    ) -> None:
        start = self._starts.pop()
        self._tick += 1
        self._in_use.subtract(needed)
        if self._in_backward:
            return
        if torch.is_grad_enabled():
            self._calls.append((module, needed, False))
        for unit in needed:
            self._pending[unit].discard(module)
        has_backward = torch.is_grad_enabled()
        if has_backward:
            use = _Use(start, self._tick, needed)
            self._uses.append(use)
            for unit in needed:
                self._first_use[unit] = min(start, self._first_use.get(unit, start))
            on_gradients_of(output, partial(self._before_backward, use))
        is_outermost = not self._starts
        for unit in self._units if is_outermost else needed:
            if is_outermost or not self._pending[unit]:
                self._leave(unit, has_backward=has_backward)
        if is_outermost and self._saving is not None:
            self._saving.__exit__()
            self._saving = None

    def _leave(self, unit: Unit, *, has_backward: bool) -> None:
        if self._in_use[unit] or (has_backward and unit in self._kept):
            return
        unit.finish_gather()
        if unit.param_state is ParamState.WHOLE:
            unit.free_params()

    def _before_backward(self, use: _Use, grad: Tensor) -> None:
        self._in_backward = True
        later = [index for index, each in enumerate(self._uses) if each is use]
        if later:
            self._unwind(len(self._uses) - later[0])

    def _unwind(self, count: int) -> None:
        """Come past the last uses of the forward, in reverse, whether gradients came or not."""
        for _ in range(count):
            use = self._uses.pop()
            # Every node made after this use has been evaluated.
            for unit in self._units[::-1]:
                if self._first_use.get(unit, -1) >= use.stop:
                    self._end_gradients(unit)
            self._gather(use.needed, ahead=self._before_in_backward(use.needed))

    def _end_gradients(self, unit: Unit) -> None:
        self._grads.close(unit)
        self._first_use.pop(unit, None)
        unit.finish_gather()
        if unit.param_state is ParamState.WHOLE:
            unit.free_params()

    def _gather(self, needed: Sequence[Unit], *, ahead: Sequence[Unit]) -> None:
        for unit in (*needed, *ahead):
            if unit.param_state is ParamState.SHARDED:
                self._grads.end_sum_in(unit.group)
                unit.start_gather()
        for unit in needed:
            unit.finish_gather()

    def _after_in_forward(self, needed: Sequence[Unit]) -> Sequence[Unit]:
        """The next units that this forward has not come to."""
        if not needed or not self._prefetch or self._in_backward:
            return ()
        ahead: list[Unit] = []
        for group in dict.fromkeys(unit.group for unit in needed):
            line = self._of_group[group]
            first = max(line.index(unit) for unit in needed if unit.group is group) + 1
            ahead += [unit for unit in line[first : first + self._prefetch] if self._pending[unit]]
        return ahead

    def _before_in_backward(self, needed: Sequence[Unit]) -> Sequence[Unit]:
        """The next units that backward comes to, as the forward used them."""
        if not needed or not self._prefetch:
            return ()
        coming = dict.fromkeys(unit for use in self._uses[::-1] for unit in use.needed)
        ahead: list[Unit] = []
        for group in dict.fromkeys(unit.group for unit in needed):
            line = [unit for unit in coming if unit.group is group and unit not in needed]
            ahead += line[: self._prefetch]
        return ahead

    def _keep(self, tensor: Tensor) -> object:
        """Keep where a view of a whole param lies in place of the view, which would hold memory."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        for unit in self._units:
            whole = unit.params
            if whole is None:
                if storage.nbytes() == tensor.element_size():
                    _check_present(unit, address)
            elif whole.untyped_storage().data_ptr() == address and whole.dtype == tensor.dtype:
                return _Kept(
                    unit, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()
                )
        return tensor

    def _restore(self, kept: object) -> Tensor:
        """Find it again, gathered anew if backward reads it before it comes to a module."""
        if not isinstance(kept, _Kept):
            assert isinstance(kept, Tensor)
            return kept
        self._gather((kept.unit,), ahead=())
        whole = kept.unit.params
        assert whole is not None
        return whole.as_strided(kept.size, kept.stride, kept.offset)


def _check_present(unit: Unit, address: int) -> None:
    """Refuse a read of what stands for a param of a unit that is not in memory.

    Raises:
        ModelError: If that is what lies at the address.
    """
    for memory in unit.members:
        if memory.param.numel() and memory.param.data_ptr() == address:
            raise ModelError(
                f"expected {memory.name!r} to be read by the forward of a module that it belongs "
                f"to, before which it is gathered, but another one read it while it was SHARDED. "
                f"Try to register it in the module that reads it, or a stage below 3."
            )
