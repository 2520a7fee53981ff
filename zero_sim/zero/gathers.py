"""Param schedules: when params are gathered, and when unsharded params are freed.

[Note: one order of gathers and reductions]
If params are also gathered during backward, reductions must not wait for gradients: ranks with
different gradients would then reduce between different gathers. So a unit is ready when backward
has passed every module that uses it. This is the same point on all ranks that call the same modules
in the same order, because autograd evaluates nodes in reverse order of creation. Ranks must do
that, as with any engine that gathers params on use.

Ranks with different experts may have different numbers of expert units between the dense ones. So
prefetched units and the kept last unit are counted per group of ranks. A reduction that ends with
another call in its group ends before a gather in that group (`before_gather`).
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
    """Unsharded params that stay; if their state is sharded, owners send new values after a step.

    Args:
        wrapped: The module, with the units to gather.
    """

    handles: list[RemovableHandle]
    """Hooks on modules, until `unwrap`."""

    def __init__(self, wrapped: Wrapped) -> None:
        self._units = wrapped.units
        self._unit_of = wrapped.unit_of
        self._gathered = wrapped.buffers if wrapped.config.sharding.state else ()
        self.handles = []

    def start(self) -> None:
        """Send the owners' new values to every rank, or start to."""
        self.gather()

    def gather(self) -> None:
        """Send the owners' new values to every rank, and wait."""
        for buffer in self._gathered:
            buffer.allgather_params()

    def finish(self) -> None:
        """Wait for all gathers in flight."""

    def check_read(self, param: nn.Parameter, *, name: str) -> None:
        """Refuse a gradient of a param whose forward read an old value, or none."""

    def finish_backward(self) -> None:
        """End a backward."""


class UnderForward(StayWhole):
    """Gathers all units in the background; each module waits for its own before its forward.

    Args:
        wrapped: The module to put hooks on, with its units in the order of their gathers.
    """

    def __init__(self, wrapped: Wrapped) -> None:
        super().__init__(wrapped)
        unit_of = self._unit_of
        users = find_users(wrapped.module)
        for user, params in users.items():
            # A dict as an ordered set: units in the order of the module's params.
            needed = {unit_of[param]: None for param in params if param in unit_of}
            if user is not None and needed:
                hook = partial(self._before_forward, tuple(needed))
                self.handles.append(user.register_forward_pre_hook(hook))
        # No hook fires before the use of these params, so start() waits for them.
        self._unguarded = {unit_of[param] for param in users.get(None, ()) if param in unit_of}

    def start(self) -> None:
        """Issue the gathers."""
        for unit in self._units:
            unit.start_gather()
        # A second loop, so that all gathers are issued before the first wait.
        for unit in self._units:
            if unit in self._unguarded:
                unit.finish_gather()

    def finish(self) -> None:
        """Wait for all gathers."""
        for unit in self._units:
            unit.finish_gather()

    def check_read(self, param: nn.Parameter, *, name: str) -> None:
        """Refuse a gradient of a param without a wait for its gather: forward read an old value.

        Raises:
            ModelError: If the gather of the param is still in flight.
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
    """One call of a module in a forward with gradients."""

    start: int
    stop: int
    """Half-open, counted in starts and ends of calls since the last micro-batch ended."""
    module: nn.Module
    needed: tuple[Unit, ...]
    runs_again: bool
    """True if it ran without gradients, as under a reentrant checkpoint. If it has a backward, that
    calls it again, and gathers."""


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """Position of a view of an unsharded param, saved by autograd in place of its memory."""

    unit: Unit
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class OnUse(StayWhole):
    """Sharded params: gathered before a module uses them, and resharded afterwards.

    In a forward a unit is resharded after the last module that uses it. Backward gathers a unit
    before the first module that needs it, and reshards it after the last. See [Note: one order of
    gathers and reductions].

    Args:
        wrapped: The module to put hooks on. Its config has the number of further units to prefetch
            per group of ranks, in both directions, when a module uses a unit.
        grads: The gradient schedule; it reduces a unit once no further gradient of it can arrive.

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
        # Backward starts with the last unit, so resharding it after forward would only cost a
        # second gather. One such unit for each group of ranks.
        last = [units[-1] for units in self._of_group.values()]
        self._kept = frozenset(last if wrapped.config.reshard_after_forward else units)
        self._users: dict[Unit, set[nn.Module]] = {unit: set() for unit in units}
        # Modules of this forward that have not run yet, by unit.
        self._pending: dict[Unit, set[nn.Module]] = {}
        # Starts and ends of module calls so far: the clock of `_Use` and `_first_use`.
        self._tick = 0
        # Starts of the modules that run now, the outermost first.
        self._starts: list[int] = []
        # Uses of this forward, in order of their ends, until backward has passed them.
        self._uses: list[_Use] = []
        # Start of each unit's first use. Once backward has passed it, no gradient of the unit
        # follows.
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
            # always_call: if the forward raises, its units are resharded all the same.
            self.handles.append(user.register_forward_hook(after, always_call=True))

    def gather(self) -> None:
        """Reshard all units, because their values are old; each is gathered on use."""
        self.free_all()

    def free_all(self) -> None:
        """Reshard all units: their owners have new values, or a step starts again."""
        for unit in self._units:
            unit.finish_gather()
            if unit.param_state is ParamState.WHOLE:
                unit.free_params()

    def finish_backward(self) -> None:
        """End backward: close all units, including those of modules it did not reach here."""
        # Other ranks may have reached units that this rank did not, so they are all reduced.
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
                f"expected {name!r} to be used by the forward of its own module, got a gradient "
                f"although no such forward gathered it. Call that module, or register the param "
                f"in the module that uses it."
            )

    def _before_forward(
        self, needed: tuple[Unit, ...], module: nn.Module, args: tuple[object, ...]
    ) -> None:
        # The outermost forward starts here, unless backward runs a checkpointed block again.
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
        # A block run again in backward: its uses were recorded in forward. Keep its params, since
        # its backward follows at once.
        if self._in_backward:
            self._watch_again(module, output)
            return
        for unit in needed:
            self._pending[unit].discard(module)
        # A reentrant checkpoint runs modules without gradients, and again in backward with them.
        # Inside an outer forward with gradients, such a use may have a backward.
        has_backward = torch.is_grad_enabled() or self._saving is not None
        if has_backward:
            use = _Use(start, self._tick, module, needed, not torch.is_grad_enabled())
            self._uses.append(use)
            for unit in needed:
                self._first_use[unit] = min(start, self._first_use.get(unit, start))
            on_gradients_of(output, partial(self._before_backward, use))
        is_outermost = not self._starts
        # After the outermost forward even units of modules that never ran are resharded.
        for unit in self._units if is_outermost else needed:
            if is_outermost or not self._pending[unit]:
                self._leave(unit, has_backward=has_backward)
        if is_outermost and self._saving is not None:
            self._saving.__exit__()
            self._saving = None

    def _leave(self, unit: Unit, *, has_backward: bool) -> None:
        # Kept units are resharded by the end of their own backward.
        if has_backward and unit in self._kept:
            return
        unit.finish_gather()
        if unit.param_state is ParamState.WHOLE:
            unit.free_params()

    def _watch_again(self, module: nn.Module, output: object) -> None:
        """Watch the output of a module that ran without gradients and runs again in backward."""
        for use in self._uses[::-1]:
            if use.module is module and use.runs_again:
                on_gradients_of(output, partial(self._before_backward, use))
                return

    def _before_backward(self, use: _Use, grad: Tensor) -> None:
        self._in_backward = True
        # Modules whose outputs got no gradient are skipped: unwind past them as well.
        # Only an output's first gradient unwinds. For later ones the use is gone already.
        later = [index for index, each in enumerate(self._uses) if each is use]
        if later:
            self._unwind(len(self._uses) - later[0])

    def _unwind(self, count: int) -> None:
        """Pass the last `count` uses of the forward, in reverse, with or without gradients."""
        for _ in range(count):
            use = self._uses.pop()
            # Autograd has evaluated every node created after this use, so units first used later
            # get no further gradients.
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
            unit.free_params()

    def _gather(self, needed: Sequence[Unit], *, ahead: Sequence[Unit]) -> None:
        for unit in (*needed, *ahead):
            if unit.is_sharded:
                # Some sums end with a second call, which must precede the gather on all ranks.
                self._grads.before_gather(unit.group)
                unit.start_gather()
        for unit in needed:
            unit.finish_gather()

    def _after_in_forward(self, needed: Sequence[Unit]) -> Sequence[Unit]:
        """Return the next units that this forward has not reached, to prefetch them."""
        if not needed or not self._prefetch or self._in_backward:
            return ()
        ahead: list[Unit] = []
        # Counted per group: a prefetch in one group must not depend on units of another.
        for group in dict.fromkeys(unit.group for unit in needed):
            line = self._of_group[group]
            first = max(line.index(unit) for unit in needed if unit.group is group) + 1
            ahead += [unit for unit in line[first : first + self._prefetch] if self._pending[unit]]
        return ahead

    def _before_in_backward(self, needed: Sequence[Unit]) -> Sequence[Unit]:
        """Return the next units that backward will reach, from the order of forward's uses."""
        if not needed or not self._prefetch:
            return ()
        # Backward passes uses in reverse; only the first of a unit counts.
        coming = dict.fromkeys(unit for use in self._uses[::-1] for unit in use.needed)
        ahead: list[Unit] = []
        for group in dict.fromkeys(unit.group for unit in needed):
            line = [unit for unit in coming if unit.group is group and unit not in needed]
            ahead += line[: self._prefetch]
        return ahead

    def _keep(self, tensor: Tensor) -> object:
        """Save the position of a view of an unsharded param; the view would keep its memory."""
        # Compare addresses, because autograd saves views of the unsharded memory, not the params.
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        for unit in self._units:
            whole = unit.params
            if whole is None:
                # The placeholder of a sharded param is one element, see `absent`.
                if storage.nbytes() == tensor.element_size():
                    _check_present(unit, address)
            elif whole.untyped_storage().data_ptr() == address and whole.dtype == tensor.dtype:
                return _Kept(
                    unit, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()
                )
        return tensor

    def _restore(self, kept: object) -> Tensor:
        """Return a saved view again, and gather its unit if no module has yet."""
        # Autograd also saves other tensors, such as activations: these pass unchanged.
        if not isinstance(kept, _Kept):
            assert isinstance(kept, Tensor)
            return kept
        # No-op if a module has gathered the unit already.
        self._gather((kept.unit,), ahead=())
        whole = kept.unit.params
        assert whole is not None
        # From the position, because the unit may be at another address than in forward.
        return whole.as_strided(kept.size, kept.stride, kept.offset)


def _check_present(unit: Unit, address: int) -> None:
    """Refuse a read of the placeholder of a sharded param.

    Raises:
        ModelError: If the address is that of a placeholder of the unit.
    """
    for memory in unit.members:
        if memory.param.numel() and memory.param.data_ptr() == address:
            raise ModelError(
                f"expected {memory.name!r} to be read by the forward of its own module, which "
                f"gathers it, but another module read it while it was SHARDED. Register it in the "
                f"module that reads it, or choose a stage below 3."
            )


ParamSchedule = StayWhole
"""A textbook param schedule, or a subclass of one."""


def schedule_params(
    wrapped: Wrapped, *, grads: GradSchedule, on_use: type[OnUse] = OnUse
) -> ParamSchedule:
    """Return the param schedule for a config.

    Args:
        wrapped: The module with its config.
        grads: The gradient schedule.
        on_use: Class of the schedule for sharded params.
    """
    if wrapped.config.sharding.params:
        assert isinstance(grads, UnderBackward)
        return on_use(wrapped, grads=grads)
    if wrapped.config.overlap_params:
        return UnderForward(wrapped)
    return StayWhole(wrapped)
