"""Param schedules: when params are gathered, and when whole ones are let go.

[Note: one order of gathers and reductions]
Where params are gathered under backward, too, reductions that wait for gradients would come between
different gathers on ranks whose gradients differ. There a unit is ready when backward has come past
every module that uses it, which is at the same point on all ranks that call the same modules in the
same order: autograd evaluates nodes in the reverse order of their making. Ranks must do that, as
with any engine that gathers params on use.

Ranks that hold other experts may have more units of these, or fewer, between those that all have.
So what is counted in units, how far is gathered ahead and which one is kept, is counted among those
of one group of ranks; and a reduction that ends with another call in its group ends before a gather
in that group (`before_gather`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from zero_sim.errors import ModelError
from zero_sim.zero.hooks import find_users, on_gradients_of
from zero_sim.zero.schedule import GradSchedule, UnderBackward, Wrapped
from zero_sim.zero.states import ParamState
from zero_sim.zero.unit import Unit


class StayWhole:
    """Whole params that stay; where their state is sharded, owners send new values after a step.

    Args:
        wrapped: Its units are gathered.
    """

    handles: list[RemovableHandle]
    """Hooks on modules, until the module is unwrapped."""

    def __init__(self, wrapped: Wrapped) -> None:
        self._units = wrapped.units
        self._unit_of = wrapped.unit_of
        self._gathered = wrapped.buffers if wrapped.config.sharding.state else ()
        self.handles = []

    def start(self) -> None:
        """Give every rank what the owners wrote, or begin to."""
        self.gather()

    def gather(self) -> None:
        """Give every rank what the owners wrote, and come back when all is there."""
        for buffer in self._gathered:
            buffer.allgather_params()

    def finish(self) -> None:
        """Wait for all params that were begun."""

    def check_read(self, param: nn.Parameter, *, name: str) -> None:
        """Refuse a gradient of a param of which forward read an old value, or none."""

    def finish_backward(self) -> None:
        """Come to the end of a backward."""


class UnderForward(StayWhole):
    """Gathers all units in the background, each waited for before a module uses it.

    Args:
        wrapped: Hooks are put on its modules; its units are issued in their order.
    """

    def __init__(self, wrapped: Wrapped) -> None:
        super().__init__(wrapped)
        unit_of = self._unit_of
        users = find_users(wrapped.module)
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

    def check_read(self, param: nn.Parameter, *, name: str) -> None:
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
    module: nn.Module
    needed: tuple[Unit, ...]
    runs_again: bool
    """True if it ran without gradients, as under a reentrant checkpoint: if it has a backward it is
    called once more, and gathers."""


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """What autograd keeps of a whole param, without keeping its memory."""

    unit: Unit
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class OnUse(StayWhole):
    """Params that are gathered before a module uses them, and freed when no module does.

    In a forward a unit is freed once every module that uses it has run; the last one stays, as the
    backward begins with it, the last of each group of ranks. Backward gathers a unit before the
    first module that needs it, and frees it when it has come past the last. See [Note: one order of
    gathers and reductions].

    Args:
        wrapped: Hooks are put on its modules. Its config says how many further units of a group of
            ranks are gathered ahead, in both directions, when a module uses one.
        grads: Reduces a unit when no further gradient of it comes.

    Raises:
        ModelError: If nothing tells when some params are used.
    """

    def __init__(self, wrapped: Wrapped, *, grads: UnderBackward) -> None:
        super().__init__(wrapped)
        module, units, unit_of = wrapped.module, wrapped.units, wrapped.unit_of
        self._prefetch = wrapped.config.prefetch
        self._grads = grads
        self._of_group: dict[dist.ProcessGroup | None, list[Unit]] = {}
        for unit in self._units:
            self._of_group.setdefault(unit.group, []).append(unit)
        last = [units[-1] for units in self._of_group.values()]
        self._kept = frozenset(last if wrapped.config.reshard_after_forward else units)
        self._users: dict[Unit, set[nn.Module]] = {unit: set() for unit in units}
        self._pending: dict[Unit, set[nn.Module]] = {}
        self._tick = 0
        self._starts: list[int] = []
        self._uses: list[_Use] = []
        self._first_use: dict[Unit, int] = {}
        self._in_backward = False
        self._saving: saved_tensors_hooks | None = None
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

    def gather(self) -> None:
        """Let go of what is old: each unit is gathered when it is used."""
        self.free_all()

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
        self._in_backward = False
        self._tick = 0
        self.free_all()

    def check_read(self, param: nn.Parameter, *, name: str) -> None:
        """Refuse a gradient of a param that no module gathered: forward read no value of it.

        Raises:
            ModelError: If the params of its unit are not in memory.
        """
        unit = self._unit_of.get(param)
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
            if torch.is_grad_enabled():
                self._saving = saved_tensors_hooks(self._keep, self._restore)
                self._saving.__enter__()
        self._starts.append(self._tick)
        self._tick += 1
        self._gather(needed, ahead=self._after_in_forward(needed))
        for unit in needed:
            unit.use()

    def _after_forward(
        self,
        needed: tuple[Unit, ...],
        module: nn.Module,
        args: tuple[object, ...],
        output: object,
    ) -> None:
        start = self._starts.pop()
        self._tick += 1
        for unit in needed:
            unit.leave()
        if self._in_backward:
            self._watch_again(module, output)
            return
        for unit in needed:
            self._pending[unit].discard(module)
        # A reentrant checkpoint runs modules without gradients, and again with them in backward.
        has_backward = torch.is_grad_enabled() or self._saving is not None
        if has_backward:
            use = _Use(start, self._tick, module, needed, not torch.is_grad_enabled())
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
        if has_backward and unit in self._kept:
            return
        unit.finish_gather()
        if unit.param_state is ParamState.WHOLE:
            unit.free_params()

    def _watch_again(self, module: nn.Module, output: object) -> None:
        """Watch what a module returns that ran without gradients and runs again in backward."""
        for use in self._uses[::-1]:
            if use.module is module and use.runs_again:
                on_gradients_of(output, partial(self._before_backward, use))
                return

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
            if not use.runs_again:
                self._gather(use.needed, ahead=self._before_in_backward(use.needed))

    def _end_gradients(self, unit: Unit) -> None:
        self._grads.close(unit)
        self._first_use.pop(unit, None)
        unit.finish_gather()
        if unit.param_state is ParamState.WHOLE:
            unit.free_params()

    def _gather(self, needed: Sequence[Unit], *, ahead: Sequence[Unit]) -> None:
        for unit in (*needed, *ahead):
            if unit.is_sharded:
                self._grads.before_gather(unit.group)
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


ParamSchedule = StayWhole
"""A schedule of the textbook or one that extends it."""


def schedule_params(
    wrapped: Wrapped, *, grads: GradSchedule, on_use: type[OnUse] = OnUse
) -> ParamSchedule:
    """Return the param schedule that a config requests.

    Args:
        wrapped: With its config.
        grads: The gradient schedule.
        on_use: The class of a schedule of sharded params.
    """
    if wrapped.config.sharding.params:
        assert isinstance(grads, UnderBackward)
        return on_use(wrapped, grads=grads)
    if wrapped.config.overlap_params:
        return UnderForward(wrapped)
    return StayWhole(wrapped)
