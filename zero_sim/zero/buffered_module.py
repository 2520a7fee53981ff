"""A module's buffers, and the tensors that must start equal on groups of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_sim.layout import BufferPlan, ParamSpec, plan_buffers
from zero_sim.zero.buffer import Buffer
from zero_sim.zero.collectives import size_and_rank
from zero_sim.zero.config import ZeroConfig
from zero_sim.zero.groups import Holders
from zero_sim.zero.model import PlainCast, find_grad_dtype
from zero_sim.zero.unit import Unit


def build_buffers(
    params: Mapping[str, nn.Parameter],
    *,
    holders: Holders,
    config: ZeroConfig,
    cast: PlainCast,
    unit: Callable[..., Unit],
    buffer_of: Callable[[str], int] | None,
) -> tuple[Buffer, ...]:
    """Move trained params into buffers.

    Args:
        params: Params by name, in registration order.
        holders: The ranks that hold each kind.
        config: Stage, numerics and layout.
        cast: Conversion from masters to working params.
        unit: Unit factory.
        buffer_of: Returns a number for a param name. Params with different numbers share no buffer.
    """
    specs: dict[str, list[ParamSpec]] = {}
    for name, param in params.items():
        kind = holders.kinds[name]
        spec = ParamSpec(
            name=name,
            shape=tuple(param.shape),
            dtype=cast.dtype_names[param.dtype],
            kind=kind,
            group=0 if buffer_of is None else buffer_of(name),
        )
        specs.setdefault(kind, []).append(spec)
    buffers: list[Buffer] = []
    for plan in _plan(specs, holders=holders, config=config):
        members = {placed.name: params[placed.name] for placed in plan.params}
        groups = holders.groups_of(plan.key.kind)
        in_fp32 = config.grad_dtype == "fp32"
        buffers.append(
            Buffer(
                plan,
                params=members,
                sharding=config.sharding,
                groups=groups,
                unit=unit,
                grad_dtype=torch.float32 if in_fp32 else find_grad_dtype(members),
                cast=cast,
                accumulate_sums=config.sync == "every",
            )
        )
    return tuple(buffers)


def _plan(
    specs: Mapping[str, Sequence[ParamSpec]], *, holders: Holders, config: ZeroConfig
) -> Iterator[BufferPlan]:
    """Plan the buffers of each kind for its shard group; kinds in registration order."""
    for kind, members in specs.items():
        owners = holders.owners_of(kind)
        # Stage 0 has no shard group, but a single shard, owned by every rank.
        shard_count = 1 if owners is None else size_and_rank(owners)[0]
        yield from plan_buffers(members, policy=replace(config.layout, shard_count=shard_count))


def find_replicated_tensors(
    module: nn.Module, *, buffers: Sequence[Buffer], holders: Holders
) -> list[tuple[list[Tensor], dist.ProcessGroup]]:
    """Return all tensors that must start equal on a group of ranks, with that group.

    A flat buffer is a single tensor. Tensors on all ranks come first, so that ranks with different
    experts issue collectives in the same order.
    """
    in_buffers = {param for buffer in buffers for param in buffer.memory}
    # Dense first, even if the first buffer contains experts.
    tensors: dict[str, list[Tensor]] = {"dense": []}
    for buffer in buffers:
        tensors.setdefault(buffer.plan.key.kind, []).extend(buffer.working_memory())
    # Frozen params and module buffers too, because forward reads them.
    frozen = (each for each in module.named_parameters() if each[1] not in in_buffers)
    for name, tensor in (*frozen, *module.named_buffers()):
        tensors.setdefault(holders.kind_of(name, tensor), []).append(tensor)
    # Kinds on all ranks share a list, so that their small tensors share a message.
    shared = [
        tensor for kind, members in tensors.items() if holders.are_all(kind) for tensor in members
    ]
    own = [(tensors.get(kind, []), held.group) for kind, held in holders.parts.items()]
    return [(shared, holders.dense.group), *own]
