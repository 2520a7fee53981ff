"""Contiguous memory for params that share kind and dtype: the lowest layer of ZeRO.

A `Buffer` builds the units of a layout plan and gives them memory. It handles flat tensors, views
and storage, but no modules, backward passes or optimizers.

Gradients or params that are not sharded live in a flat tensor for the whole run. If they are
sharded, a unit allocates unsharded memory only during use, and this rank's shards stay resident
in a contiguous tensor. At stage 0 params stay in place. Each unit is then a single shard owned by
every rank, so the layers above need no second code path.

With redundancy, each shard group reduce-scatters its own gradients, which gives partial sums. A
second sum, over the replica group, completes them. Gathers stay inside the shard group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_sim.errors import LayoutError, UsageError
from zero_sim.layout import BucketPlan, BufferPlan, Span
from zero_sim.zero.collectives import size_and_rank
from zero_sim.zero.groups import KindGroups
from zero_sim.zero.model import PlainCast
from zero_sim.zero.sharding import Sharding
from zero_sim.zero.states import ParamState
from zero_sim.zero.storage import FlatStorage, Storage, TransientStorage
from zero_sim.zero.unit import ParamMemory, Unit, absent, set_main_grad


class Buffer:
    """The units of one `BufferPlan`, with their memory.

    The constructor moves tensors. If gradients are unsharded, `param.main_grad` becomes a view into
    `grad_data`. If the state is sharded but params are not, `param.data` becomes a view into
    `param_data` with the same values. Both views are contiguous in the param's logical order,
    whatever its original strides. Sharded params stay in place until `shard_params`.

    Args:
        plan: The layout. Its shard count must equal the shard group's size, or 1 without a group.
        params: The plan's params by name, all on the same device.
        sharding: Memory to shard over the shard group.
        groups: This rank's shard group and replica group.
        unit: Unit factory.
        grad_dtype: Gradient dtype.
        cast: Conversion from masters to working params.
        accumulate_sums: True to add up the sums from several micro-batches in separate memory, as
            long as this rank's shards. Always done if gradients are sharded.

    Raises:
        LayoutError: If the shard count does not fit the group, or `params` does not fit the plan.
    """

    plan: BufferPlan
    shard: int  # this rank's shard index
    grad_data: Tensor | None  # 1D; None if gradients are sharded
    param_data: Tensor | None  # 1D; None if params are sharded, or nothing is
    shard_data: Tensor | None  # 1D, this rank's shards of the params; None if they are unsharded
    total_data: Tensor | None  # 1D, this rank's shards of the sums; None without accumulated sums
    grad_dtype: torch.dtype
    units: tuple[Unit, ...]
    """Units with elements. An empty bucket has no unit, because it moves nothing."""

    def __init__(
        self,
        plan: BufferPlan,
        *,
        params: Mapping[str, nn.Parameter],
        sharding: Sharding,
        groups: KindGroups,
        unit: Callable[..., Unit] = Unit,
        grad_dtype: torch.dtype,
        cast: PlainCast | None = None,
        accumulate_sums: bool = False,
    ) -> None:
        self.plan = plan
        self.sharding = sharding
        self._cast = cast or PlainCast()
        self.shard = _find_own_shard(plan, group=groups.shard_group)
        _check_params(plan, params)
        first = next(iter(params.values()))
        self.device, self.grad_dtype = first.device, grad_dtype
        # Zeros, not torch.empty: padding takes part in every sum and must stay zero.
        self.grad_data = self.param_data = self.shard_data = self.total_data = None
        # 1D, all buckets with padding. Sharded gradients use each unit's transient memory instead.
        if not sharding.grads:
            self.grad_data = self._zeros(plan.span.numel, dtype=grad_dtype)
        if sharding.state and not sharding.params:
            self.param_data = self._zeros(plan.span.numel, dtype=first.dtype)
        by_index = self._build_units(groups=groups, unit=unit, dtype=first.dtype)
        # 1D, this rank's shards of all units, one after another.
        if sharding.params:
            self.shard_data = self._zeros(
                sum(unit.own_span.numel for unit in by_index.values()), dtype=first.dtype
            )
        # Sums need separate memory: at stage 2 unsharded gradients are transient, and with
        # sync="every" the next micro-batch overwrites them.
        if accumulate_sums or sharding.grads:
            self.total_data = self._zeros(
                sum(unit.own_span.numel for unit in by_index.values()), dtype=grad_dtype
            )
        self._give_parts(by_index.values())
        self.units = tuple(by_index.values())
        self._memory = self._adopt(params, units=by_index)

    @property
    def memory(self) -> Mapping[nn.Parameter, ParamMemory]:
        """The memory of each param, in buffer order."""
        return self._memory

    def working_memory(self) -> list[Tensor]:
        """Return the unsharded working params, as a single flat tensor if possible.

        If params are sharded, call this only before `shard_params`.
        """
        if self.param_data is not None:
            return [self.param_data]
        return [param.detach() for param in self._memory]

    def shard_params(self) -> None:
        """Keep only this rank's shards of the params. No-op for unsharded params."""
        if self.shard_data is None:
            return
        for unit in self.units:
            assert unit.param_shard is not None
            for memory in unit.members:
                # The part inside this rank's shard, as offsets into the unit.
                held = memory.in_unit.intersect(unit.own_span)
                if not held.empty:
                    flat = _view(
                        memory.param.detach().reshape(-1), held.shift(-memory.in_unit.start)
                    )
                    _view(unit.param_shard, held.shift(-unit.own_span.start)).copy_(flat)
                # The placeholder drops the unsharded values.
                memory.param.data = absent(memory.param)
            # Set directly, because the unit has no unsharded memory to free yet.
            unit.param_state = ParamState.SHARDED

    def zero_grads(self) -> None:
        """Zero all gradients, sums and padding."""
        for unit in self.units:
            unit.reset_grads()
        # With transient gradients, reset_grads() has zeroed the sums already.
        for memory in (self.grad_data, None if self.sharding.grads else self.total_data):
            if memory is not None:
                memory.zero_()

    def reduce_grads(self) -> None:
        """Sum gradients over all ranks, replicas included, in place.

        Afterwards only this rank's shards contain sums; the rest is undefined.
        """
        # fill() first: without any gradient here, a unit contributes zeros, because other ranks
        # wait for its collective.
        for unit in self.units:
            unit.fill()
            unit.reduce()

    def unit_of(self, param: nn.Parameter) -> Unit | None:
        """Return a param's unit; None for an empty param in an empty bucket.

        Raises:
            LayoutError: If the param is not in this buffer.
        """
        return self._find(param).unit

    def allgather_params(self) -> None:
        """Gather the unsharded working params from their owners."""
        if self.param_data is None:
            raise UsageError(
                "expected a buffer with unsharded params and sharded state, got "
                "allgather_params() on one without. Gather each unit on use at stage 3; "
                "at stage 0 every rank writes all params itself."
            )
        for unit in self.units:
            unit.gather()

    def get_grad_shard(self, param: nn.Parameter) -> Tensor:
        """Return this rank's part of a param's gradient; after the reduction, the sum over ranks.

        Returns:
            1D view into `total_data` if allocated, else into `grad_data`, in the gradient dtype.
            Empty if this rank owns no part of the param.

        Raises:
            LayoutError: If the param is not in this buffer.
        """
        return self._find(param).own_grad

    def get_param_shard(self, param: nn.Parameter) -> Tensor:
        """Return this rank's part of a working param as weights, 1D, read only.

        Raises:
            LayoutError: If the param is not in this buffer.
        """
        memory = self._find(param)
        return self._cast.read(param, memory.param_shard.reshape(-1))

    def write_param_shard(self, param: nn.Parameter, data: Tensor) -> None:
        """Write this rank's part of a working param, cast to its dtype.

        Other ranks receive it with the next gather.

        Args:
            param: A param in this buffer.
            data: 1D, as long as this rank's part, which may be empty.

        Raises:
            LayoutError: If the length is wrong, or the param is not in this buffer.
        """
        memory = self._find(param)
        working = memory.param_shard
        # Masters are 1D. `working` has the param's shape if nothing is sharded.
        if data.dim() != 1 or data.numel() != working.numel():
            raise LayoutError(
                f"expected 1D data of {working.numel()} elements, this rank's part of the param, "
                f"got shape {tuple(data.shape)} for param {memory.name!r}, "
                f"shard {self.shard} of {self.plan.policy.shard_count}."
            )
        if memory.unit is not None:
            # Before the copy, because a gather in flight may still read the shard.
            memory.unit.update()
        # Masters may be on another device (offloaded state).
        data = data.detach().to(working.device).view(working.shape)
        self._cast.write_(param, working, data)

    def unsharded_params(self) -> dict[nn.Parameter, Tensor]:
        """Return unsharded copies of sharded params; a collective.

        Meant for inspection between steps: sharded units are sharded again afterwards. Copies from
        the same unit share memory. Empty if params are unsharded.
        """
        found: dict[nn.Parameter, Tensor] = {}
        # In the same order on all ranks, because each gather is a collective.
        for unit in self.units if self.sharding.params else ():
            was_sharded = unit.is_sharded
            if was_sharded:
                unit.gather()
            whole = unit.params
            assert whole is not None
            copy = whole.clone()
            # Before the next gather, so that memory holds a single unsharded unit at a time.
            if was_sharded:
                unit.reshard()
            for memory in unit.members:
                found[memory.param] = _view(copy, memory.in_unit).view(memory.param.shape)
        return found

    def _zeros(self, elems: int, *, dtype: torch.dtype) -> Tensor:
        return torch.zeros(elems, dtype=dtype, device=self.device)

    def _adopt(
        self,
        params: Mapping[str, nn.Parameter],
        *,
        units: Mapping[int, Unit],
    ) -> dict[nn.Parameter, ParamMemory]:
        """Point params and gradients into the resident flat memory."""
        # A param lies in one bucket, so this rank's shards hold at most one fragment.
        fragments = {fragment.param: fragment for fragment in self.plan.fragments(self.shard)}
        memory: dict[nn.Parameter, ParamMemory] = {}
        for placed in self.plan.params:
            param, fragment = params[placed.name], fragments.get(placed.name)
            unit = units.get(placed.bucket)
            bucket_start = self.plan.buckets[placed.bucket].span.start
            # 1. main_grad, [param.shape]: None if gradients are transient, set by unit.fill().
            main_grad = None
            if self.grad_data is not None:
                main_grad = _view(self.grad_data, placed.span).view(param.shape)
            # An empty param may have no unit, so fill() would never set it.
            elif unit is None:
                main_grad = self._zeros(0, dtype=self.grad_dtype).view(param.shape)
            set_main_grad(param, main_grad)
            # 2. param.data, [param.shape]: the values move into the flat buffer.
            if self.param_data is not None:
                flat = _view(self.param_data, placed.span).view(param.shape)
                flat.copy_(param.detach())
                param.data = flat
            # 3. This rank's parts, 1D; empty views for params without a fragment here.
            start = placed.span.start
            own = Span(start, start) if fragment is None else fragment.in_buffer
            in_shard = Span(0, 0) if fragment is None else fragment.in_shard
            own_grad = self._zeros(0, dtype=self.grad_dtype)
            if unit is not None and unit.grad_total is not None:
                own_grad = _view(unit.grad_total, in_shard)
            elif self.grad_data is not None:
                own_grad = _view(self.grad_data, own)
            # Stage 0: the whole param in its own memory and shape.
            param_shard = param.detach()
            if unit is not None and unit.param_shard is not None:
                param_shard = _view(unit.param_shard, in_shard)
            elif self.sharding.state:
                param_shard = param_shard.reshape(-1)
            memory[param] = ParamMemory(
                name=placed.name,
                param=param,
                in_unit=placed.span.shift(-bucket_start),
                main_grad=main_grad,
                fragment=fragment,
                own_grad=own_grad,
                param_shard=param_shard,
                unit=unit,
            )
            if unit is not None:
                unit.members.append(memory[param])
        return memory

    def _build_units(
        self,
        *,
        groups: KindGroups,
        unit: Callable[..., Unit],
        dtype: torch.dtype,
    ) -> dict[int, Unit]:
        return {
            plan.index: unit(
                name=f"bucket {plan.index} of {self.plan.key}",
                plan=plan,
                # Offsets into the unit, not into the buffer.
                own_span=plan.shard_span(self.shard).shift(-plan.span.start),
                groups=groups,
                # Gradients accumulate, so they start as zeros; a gather writes every param.
                grad_storage=self._storage(
                    self.grad_data, plan, dtype=self.grad_dtype, zeroed=True
                ),
                param_storage=(
                    self._storage(self.param_data, plan, dtype=dtype, zeroed=False)
                    if self.sharding.state
                    else None
                ),
            )
            for plan in self.plan.buckets
            if not plan.span.empty
        }

    def _give_parts(self, units: Iterable[Unit]) -> None:
        # Shards follow each other without gaps, in bucket order.
        params_start = sums_start = 0
        for unit in units:
            if self.param_data is not None:
                unit.param_shard = _view(self.param_data, unit.own_span.shift(unit.plan.span.start))
            elif self.shard_data is not None:
                unit.param_shard = self.shard_data.narrow(0, params_start, unit.own_span.numel)
                params_start += unit.own_span.numel
            if self.total_data is not None:
                unit.grad_total = self.total_data.narrow(0, sums_start, unit.own_span.numel)
                sums_start += unit.own_span.numel

    def _storage(
        self, flat: Tensor | None, plan: BucketPlan, *, dtype: torch.dtype, zeroed: bool
    ) -> Storage:
        if flat is not None:
            return FlatStorage(_view(flat, plan.span))
        return TransientStorage(plan.span.numel, dtype=dtype, device=self.device, zeroed=zeroed)

    def _find(self, param: nn.Parameter) -> ParamMemory:
        memory = self._memory.get(param)
        if memory is None:
            raise LayoutError(
                f"expected a param in buffer {self.plan.key}, got another param, with shape "
                f"{tuple(param.shape)}. Pass a trained param: frozen params are in no buffer."
            )
        return memory


def _view(flat: Tensor, span: Span) -> Tensor:
    return flat.narrow(0, span.start, span.stop - span.start)


def _find_own_shard(plan: BufferPlan, *, group: dist.ProcessGroup | None) -> int:
    """Return this rank's shard index: its group rank, not its global rank."""
    expected, rank = (1, 0) if group is None else size_and_rank(group)
    shard_count = plan.policy.shard_count
    if shard_count != expected:
        why = "because nothing is sharded" if group is None else "the size of its group"
        raise LayoutError(
            f"expected a layout of {expected} shards, {why}, got shard_count={shard_count} "
            f"in buffer {plan.key}. Use plan_buffers with LayoutPolicy(shard_count={expected})."
        )
    return rank


def _check_params(plan: BufferPlan, params: Mapping[str, nn.Parameter]) -> None:
    planned = {placed.name for placed in plan.params}
    if planned != params.keys():
        raise LayoutError(
            f"expected the params that buffer {plan.key} was planned for, got "
            f"missing={sorted(planned - params.keys())}, extra={sorted(params.keys() - planned)}."
        )
    for placed in plan.params:
        shape = tuple(params[placed.name].shape)
        if shape != placed.spec.shape:
            raise LayoutError(
                f"expected shape {placed.spec.shape}, as planned, got {shape} "
                f"for param {placed.name!r}."
            )
