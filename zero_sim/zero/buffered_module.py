"""A module whose params lie in buffers: where they lie, and which ranks hold them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_sim.layout import BufferPlan, LayoutPolicy, ParamSpec, plan_buffers
from zero_sim.zero.buffer import Buffer
from zero_sim.zero.collectives import size_and_rank
from zero_sim.zero.config import ZeroConfig
from zero_sim.zero.groups import KindGroups
from zero_sim.zero.model import PlainCast, find_grad_dtype
from zero_sim.zero.schedule import Wrapped, order_by_forward
from zero_sim.zero.seams import Seams
from zero_sim.zero.unit import Unit

KindOf = Callable[[str, Tensor], str]
"""Tells the kind of a param, trained or not, or of a module buffer, from its name and the tensor;
params of different kinds share no buffer."""


def all_dense(name: str, tensor: Tensor) -> str:
    """The kind of every param of a model without experts."""
    return "dense"


class BufferedModule:
    """The params of a module in flat buffers; what `DistributedDataParallel` trains."""

    config: ZeroConfig
    group: dist.ProcessGroup
    """The ranks that train together."""
    seams: Seams
    module: nn.Module
    params: dict[str, nn.Parameter]
    """Trainable params by name, in registration order; a tied param once."""
    cast: PlainCast
    """How masters become working params."""
    buffers: tuple[Buffer, ...]
    shard_group: dist.ProcessGroup | None
    """The ranks that hold a shard each; with one copy of the state it is `group`, and None where
    nothing is sharded."""
    replica_group: dist.ProcessGroup | None
    """The ranks that hold the same shard; None with one copy of the state."""
    kind_of: KindOf
    kinds: Mapping[str, str]
    """The kind of each trained param, by name."""

    _dense_groups: KindGroups
    _kind_groups: Mapping[str, KindGroups]
    """By kind: the groups of params that not all ranks hold."""
    _buffer_of: Callable[[str], int] | None
    """By name: params with different numbers share no buffer."""

    def groups_of(self, kind: str) -> KindGroups:
        """Return the groups over which params of a kind are summed, sharded and held in copies."""
        return self._kind_groups.get(kind, self._dense_groups)

    @property
    def has_parts(self) -> bool:
        """Whether some kinds of params are held by some of the ranks only."""
        return bool(self._kind_groups)

    def is_held_by_all(self, kind: str) -> bool:
        """Tell whether all ranks of `group` hold the params of a kind."""
        return kind not in self._kind_groups

    def owners_of(self, kind: str) -> dist.ProcessGroup | None:
        """Return the ranks that own a shard of a kind each; None where each of them owns all."""
        return self.groups_of(kind).shard_group

    def whole_params(self) -> dict[str, Tensor]:
        """Return all working params of this rank; a collective where they are sharded.

        For looking at them between steps, after `finish_param_gather`: of sharded params copies.
        """
        copies = {
            param: copy for buffer in self.buffers for param, copy in buffer.whole_params().items()
        }
        return {name: copies.get(param, param.detach()) for name, param in self.params.items()}

    def _replicated_tensors(self) -> list[tuple[list[Tensor], dist.ProcessGroup]]:
        """Everything that must start out equal on all its holders, and who they are.

        Flat buffers come as a whole. What all ranks hold is first, so that the order is theirs too.
        """
        in_buffers = set(self.params.values())
        tensors: dict[str, list[Tensor]] = {"dense": []}
        for buffer in self.buffers:
            tensors.setdefault(buffer.plan.key.kind, []).extend(buffer.working_memory())
        frozen = (each for each in self.module.named_parameters() if each[1] not in in_buffers)
        for name, tensor in (*frozen, *self.module.named_buffers()):
            tensors.setdefault(self.kind_of(name, tensor), []).append(tensor)
        shared = [
            tensor
            for kind, members in tensors.items()
            if self.is_held_by_all(kind)
            for tensor in members
        ]
        own = [(tensors.get(kind, []), held.group) for kind, held in self._kind_groups.items()]
        return [(shared, self.group), *own]

    def _plan(self) -> list[BufferPlan]:
        """Plan the buffers of each kind for the ranks that shard it; kinds as first registered."""
        specs: dict[str, list[ParamSpec]] = {}
        for name, param in self.params.items():
            kind = self.kinds[name]
            spec = ParamSpec(
                name=name,
                shape=tuple(param.shape),
                dtype=self.cast.dtype_names[param.dtype],
                kind=kind,
                group=0 if self._buffer_of is None else self._buffer_of(name),
            )
            specs.setdefault(kind, []).append(spec)
        plans: list[BufferPlan] = []
        for kind, members in specs.items():
            owners = self.owners_of(kind)
            policy = LayoutPolicy(
                shard_count=1 if owners is None else size_and_rank(owners)[0],
                align_elems=self.config.align_elems,
                align_bytes=self.config.align_bytes,
                bucket_elems=self.config.bucket_elems,
                param_order=self.config.param_order,
                partition=self.config.partition,
            )
            plans.extend(plan_buffers(members, policy=policy))
        return plans

    def _build_buffer(self, plan: BufferPlan) -> Buffer:
        params = {placed.name: self.params[placed.name] for placed in plan.params}
        in_fp32 = self.config.grad_dtype == "fp32"
        groups = self.groups_of(plan.key.kind)
        return Buffer(
            plan,
            params=params,
            sharding=self.config.sharding,
            group=groups.shard_group,
            grad_dtype=torch.float32 if in_fp32 else find_grad_dtype(params),
            cast=self.cast,
            replica_group=groups.replica_group,
            unit=self.seams.unit,
            accumulate_sums=self.config.sync == "every",
        )

    def _wrapped(self, before_sum: Callable[[Unit], None]) -> Wrapped:
        units = order_by_forward(self.buffers, params=list(self.params.values()))
        members = ((memory.param, unit) for unit in units for memory in unit.members)
        return Wrapped(
            module=self.module,
            config=self.config,
            buffers=self.buffers,
            units=units,
            unit_of={param: unit for param, unit in members if param.numel()},
            params=self.params,
            groups_of=self.groups_of,
            before_sum=before_sum,
        )
