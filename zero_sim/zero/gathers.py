"""Param schedules: when params are gathered, and when unsharded params are freed.

[Note: one order of gathers and reductions]
If params are also gathered during backward, reductions must not wait for gradients: ranks with
different gradients would reduce between different gathers. So a unit is ready when backward has
passed every module that uses it. Autograd evaluates nodes in reverse order of creation. So if all
ranks call the same modules in the same order, this point is the same on all of them. Any engine
that gathers params on use has this requirement.

Ranks with different experts may have different numbers of expert units between dense units. So
prefetched units, and the last unit that is not resharded, are counted per shard group. If a
reduction ends with a second call, it ends before the next gather in its group (`before_gather`).
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


class StayUnsharded:
    """Resident params. If the state is sharded, they are gathered from their owners after a step.

    Args:
        wrapped: The module, with the units to gather.
    """

    handles: list[RemovableHandle]
    """Handles for hooks on modules, which `unwrap` removes."""

    def __init__(self, wrapped: Wrapped) -> None:
        self._units = wrapped.units
        self._unit_of = wrapped.unit_of
        self._gathered = wrapped.buffers if wrapped.config.sharding.state else ()
        self.handles = []

    def start(self) -> None:
        """Start to gather new values from their owners; without overlap, also wait."""
        self.gather()

    def gather(self) -> None:
        """Gather new values from their owners, and wait."""
        for buffer in self._gathered:
            buffer.allgather_params()

    def finish(self) -> None:
        """Wait for all gathers in flight."""

    def check_read(self, param: nn.Parameter, *, name: str) -> None:
        """Refuse a gradient if forward read an old value of the param, or a placeholder."""

    def finish_backward(self) -> None:
        """End a backward."""


class UnderForward(StayUnsharded):
    """Gathers all units in the background. Before forward, each module waits for its own units.

    Args:
        wrapped: The module to put hooks on, with its units in the order of their gathers.
    """

    def __init__(self, wrapped: Wrapped) -> None:
        super().__init__(wrapped)
        unit_of = self._unit_of
        users = find_users(wrapped.module)
        for user, params in users.items():
            # A dict as an ordered set: units in the same order as the module's params.
            needed = {unit_of[param]: None for param in params if param in unit_of}
            if user is not None and needed:
                hook = partial(self._before_forward, tuple(needed))
                self.handles.append(user.register_forward_pre_hook(hook))
        # No hook fires before these params are used, so start() waits for them.
        self._unguarded = {unit_of[param] for param in users.get(None, ()) if param in unit_of}

    def start(self) -> None:
        """Issue all gathers."""
        for unit in self._units:
            unit.start_gather()
        # A second loop, so that the first wait follows all gathers.
        for unit in self._units:
            if unit in self._unguarded:
                unit.finish_gather()

    def finish(self) -> None:
        """Wait for all gathers."""
        for unit in self._units:
            unit.finish_gather()

    def check_read(self, param: nn.Parameter, *, name: str) -> None:
        """Refuse a gradient if forward read the param's old value.

        Raises:
            ModelError: If the param's gather is still in flight.
        """
        unit = self._unit_of.get(param)
        if unit is not None and unit.gathering:
            raise ModelError(
                f"expected {name!r} to be used by the forward of its own module, got a gradient "
                f"although no such forward waited for its gather. "
                f"Call finish_param_gather() before forward, or set overlap_params=False."
            )

    def _before_forward(self, needed: Sequence[Unit], module: nn.Module, args: object) -> None:
        for unit in needed:
            unit.finish_gather()


@dataclass(frozen=True, slots=True, eq=False)
class _Use:
    """A module call, in a forward with gradients."""

    start: int
    stop: int
    """Half-open ticks. Each start or end of a call is a tick, counted since the last micro-batch
    ended."""
    module: nn.Module
    needed: tuple[Unit, ...]
    runs_again: bool
    """True if the module ran without gradients, as under a reentrant checkpoint. Its backward, if
    any, calls the module again, and this second call gathers."""


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """The position of a view in unsharded params. Autograd saves it in place of the view."""

    unit: Unit
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class OnUse(StayUnsharded):
    """Sharded params: gathered before a module uses them, and resharded afterwards.

    Forward reshards a unit after the last module that uses it. Backward gathers a unit before the
    first module that needs it, and reshards it after the last. See [Note: one order of gathers and
    reductions].

    Args:
        wrapped: The module to put hooks on. When a module uses a unit, the next `config.prefetch`
            units in its shard group are gathered too.
        grads: The gradient schedule. It is called to close a unit once no further gradient can
            arrive.

    Raises:
        ModelError: If some params belong to no module with a forward.
    """

    def __init__(self, wrapped: Wrapped, *, grads: UnderBackward) -> None:
        super().__init__(wrapped)
        module, units, unit_of = wrapped.module, wrapped.units, wrapped.unit_of
        self._prefetch = wrapped.config.prefetch
        self._grads = grads
        self._of_group: dict[dist.ProcessGroup | None, list[Unit]] = {}
        for unit in self._units:
            self._of_group.setdefault(unit.group, []).append(unit)
        # Backward starts with the last unit in each group, so resharding it after forward would
        # only cost a second gather.
        last = [units[-1] for units in self._of_group.values()]
        self._kept = frozenset(last if wrapped.config.reshard_after_forward else units)
        self._users: dict[Unit, set[nn.Module]] = {unit: set() for unit in units}
        # Modules that have not run yet in this forward, by unit.
        self._pending: dict[Unit, set[nn.Module]] = {}
        # Starts and ends of module calls so far: the clock for `_Use` and `_first_use`.
        self._tick = 0
        # Start ticks of the modules that run now, outermost first.
        self._starts: list[int] = []
        # Uses in this forward, ordered by end, until backward has passed them.
        self._uses: list[_Use] = []
        # Start tick of each unit's first use. Once backward has passed it, the unit gets no further
        # gradient.
        self._first_use: dict[Unit, int] = {}
        self._in_backward = False
        self._saving: saved_tensors_hooks | None = None
        users = find_users(module)
        stray = [param for param in users.get(None, ()) if param in unit_of]
        if stray:
            raise ModelError(
                f"expected params below a module with a forward, which gathers them, "
                f"got {len(stray)} elsewhere in {type(module).__name__}. Give the module that owns "
                f"them a forward, or choose a stage below 3."
            )
        # The root module always gets hooks: they mark the start and the end of a forward.
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
            # always_call, so that units are resharded even if the forward raises.
            self.handles.append(user.register_forward_hook(after, always_call=True))

    def gather(self) -> None:
        """Reshard all units, because their values are old. Modules gather them on use."""
        self.reshard_all()

    def reshard_all(self) -> None:
        """Reshard all unsharded units."""
        for unit in self._units:
            unit.finish_gather()
            if unit.param_state is ParamState.WHOLE:
                unit.reshard()

    def finish_backward(self) -> None:
        """End backward: close all units, even if backward on this rank did not reach them."""
        # Other ranks may have reached more units, so every rank must reduce all of them.
        self._unwind(len(self._uses))
        for unit in self._units[::-1]:
            self._end_gradients(unit)
        self._first_use.clear()
        self._in_backward = False
        self._tick = 0
        self.reshard_all()

    def check_read(self, param: nn.Parameter, *, name: str) -> None:
        """Refuse a gradient if no module gathered the param, so forward read a placeholder.

        Raises:
            ModelError: If no forward since the last micro-batch used the param's unit.
        """
        unit = self._unit_of.get(param)
        if unit is not None and unit not in self._first_use:
            raise ModelError(
                f"expected {name!r} to be used by the forward of its own module, got a gradient "
                f"although no such forward gathered it. Call that module, or register the param "
                f"in the module that uses it."
            )

    def _before_forward(
        self, needed: tuple[Unit, ...], module: nn.Module, args: tuple[object, ...]
    ) -> None:
        # The outermost forward starts here, unless backward is running a checkpointed block again.
        if not self._starts and not self._in_backward:
            self._pending = {unit: set(users) for unit, users in self._users.items()}
            if torch.is_grad_enabled():
                # Saved views of unsharded params would keep their memory until backward.
                self._saving = saved_tensors_hooks(self._keep, self._restore)
                # Not a with block, because another hook ends it, after the outermost module.
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
        # A checkpointed block ran again in backward. Its uses were recorded in forward. Keep its
        # params, because its backward follows at once.
        if self._in_backward:
            self._watch_again(module, output)
            return
        for unit in needed:
            self._pending[unit].discard(module)
        # A reentrant checkpoint runs modules without gradients, and again in backward with
        # gradients. So inside an outer forward with gradients, this use may have a backward.
        has_backward = torch.is_grad_enabled() or self._saving is not None
        if has_backward:
            use = _Use(start, self._tick, module, needed, not torch.is_grad_enabled())
            self._uses.append(use)
            for unit in needed:
                self._first_use[unit] = min(start, self._first_use.get(unit, start))
            on_gradients_of(output, partial(self._before_backward, use))
        is_outermost = not self._starts
        # After the outermost forward, reshard even units whose modules never ran.
        for unit in self._units if is_outermost else needed:
            if is_outermost or not self._pending[unit]:
                self._leave(unit, has_backward=has_backward)
        if is_outermost and self._saving is not None:
            self._saving.__exit__()
            self._saving = None

    def _leave(self, unit: Unit, *, has_backward: bool) -> None:
        # Backward reshards the kept units when it has passed them.
        if has_backward and unit in self._kept:
            return
        unit.finish_gather()
        if unit.param_state is ParamState.WHOLE:
            unit.reshard()

    def _watch_again(self, module: nn.Module, output: object) -> None:
        """Watch the output of a module that backward runs again, under a reentrant checkpoint."""
        for use in self._uses[::-1]:
            if use.module is module and use.runs_again:
                on_gradients_of(output, partial(self._before_backward, use))
                return

    def _before_backward(self, use: _Use, grad: Tensor) -> None:
        self._in_backward = True
        # Unwind past later modules too, because backward skips modules whose outputs got no
        # gradient. Only a use's first gradient unwinds; afterwards the use is gone.
        later = [index for index, each in enumerate(self._uses) if each is use]
        if later:
            self._unwind(len(self._uses) - later[0])

    def _unwind(self, count: int) -> None:
        """Pass forward's last `count` uses in reverse, with or without gradients."""
        for _ in range(count):
            use = self._uses.pop()
            # Autograd has evaluated every node created after this use, so units that were first
            # used later get no further gradients.
            for unit in self._units[::-1]:
                if self._first_use.get(unit, -1) >= use.stop:
                    self._end_gradients(unit)
            # A reentrant checkpoint calls the module again, and its forward hook gathers.
            if not use.runs_again:
                self._gather(use.needed, ahead=self._before_in_backward(use.needed))

    def _end_gradients(self, unit: Unit) -> None:
        self._grads.close(unit)
        self._first_use.pop(unit, None)
        unit.finish_gather()
        if unit.param_state is ParamState.WHOLE:
            unit.reshard()

    def _gather(self, needed: Sequence[Unit], *, ahead: Sequence[Unit]) -> None:
        for unit in (*needed, *ahead):
            if unit.is_sharded:
                # If a sum ends with a second call, it must precede the gather on all ranks.
                self._grads.before_gather(unit.group)
                unit.start_gather()
        for unit in needed:
            unit.finish_gather()

    def _after_in_forward(self, needed: Sequence[Unit]) -> Sequence[Unit]:
        """Return units to prefetch: the next units that this forward has not reached."""
        if not needed or not self._prefetch or self._in_backward:
            return ()
        ahead: list[Unit] = []
        # Counted per group, because a prefetch must not depend on units in other groups.
        for group in dict.fromkeys(unit.group for unit in needed):
            line = self._of_group[group]
            first = max(line.index(unit) for unit in needed if unit.group is group) + 1
            ahead += [unit for unit in line[first : first + self._prefetch] if self._pending[unit]]
        return ahead

    def _before_in_backward(self, needed: Sequence[Unit]) -> Sequence[Unit]:
        """Return units to prefetch: the next units that backward will reach."""
        if not needed or not self._prefetch:
            return ()
        # Backward passes uses in reverse. Each unit counts once, at its first use in that order.
        coming = dict.fromkeys(unit for use in self._uses[::-1] for unit in use.needed)
        ahead: list[Unit] = []
        for group in dict.fromkeys(unit.group for unit in needed):
            line = [unit for unit in coming if unit.group is group and unit not in needed]
            ahead += line[: self._prefetch]
        return ahead

    def _keep(self, tensor: Tensor) -> object:
        """Replace a view of unsharded params by its position, so that the memory can be freed."""
        # Compare addresses, because autograd saves views, not the params themselves.
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        for unit in self._units:
            whole = unit.params
            if whole is None:
                # A sharded param's placeholder is a single element, see `absent`.
                if storage.nbytes() == tensor.element_size():
                    _check_present(unit, address)
            elif whole.untyped_storage().data_ptr() == address and whole.dtype == tensor.dtype:
                return _Kept(
                    unit, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()
                )
        return tensor

    def _restore(self, kept: object) -> Tensor:
        """Return a saved view again. Gather its unit first if no module has done so."""
        # Other saved tensors, such as activations, pass unchanged.
        if not isinstance(kept, _Kept):
            assert isinstance(kept, Tensor)
            return kept
        # No-op if a module has gathered the unit already.
        self._gather((kept.unit,), ahead=())
        whole = kept.unit.params
        assert whole is not None
        # From the position, because the unit's address may differ from forward's.
        return whole.as_strided(kept.size, kept.stride, kept.offset)


def _check_present(unit: Unit, address: int) -> None:
    """Refuse a read of a sharded param's placeholder.

    Raises:
        ModelError: If `address` belongs to a placeholder in the unit.
    """
    for memory in unit.members:
        if memory.param.numel() and memory.param.data_ptr() == address:
            raise ModelError(
                f"expected {memory.name!r} to be read by the forward of its own module, which "
                f"gathers it, but another module read it while it was SHARDED. Register it in the "
                f"module that reads it, or choose a stage below 3."
            )


ParamSchedule = StayUnsharded
"""A textbook param schedule, or a subclass of one."""


def schedule_params(
    wrapped: Wrapped, *, grads: GradSchedule, on_use: type[OnUse] = OnUse
) -> ParamSchedule:
    """Return the param schedule for a config.

    Args:
        wrapped: The module with its config.
        grads: The gradient schedule.
        on_use: Schedule class for sharded params.
    """
    if wrapped.config.sharding.params:
        assert isinstance(grads, UnderBackward)
        return on_use(wrapped, grads=grads)
    if wrapped.config.overlap_params:
        return UnderForward(wrapped)
    return StayUnsharded(wrapped)
