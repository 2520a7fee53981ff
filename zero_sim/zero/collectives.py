"""The collectives that ZeRO needs, always over an explicit group.

With `async_op` they return a handle at once. Do not read or write the tensors until `wait()` has
returned. Without `async_op` they return None after completion.

[Note: one byte an element]
Backends reject unknown dtypes: gloo refuses 8-bit floats, and NCCL accepts them in some versions
only. So gathers and broadcasts move such tensors as raw bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zero_sim.errors import UsageError

# torch 2.13 renames `reduce_scatter_tensor` to `reduce_scatter_single` and
# `all_gather_into_tensor` to `all_gather_single`, and warns about the old names.
_reduce_scatter: Callable[..., dist.Work | None] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
_all_gather: Callable[..., dist.Work | None] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)


def size_and_rank(group: dist.ProcessGroup) -> tuple[int, int]:
    """Return a group's size and this process's group rank.

    Raises:
        UsageError: If the group is None, or this process is not a member of it.
    """
    if group is None:
        raise UsageError(
            "expected an explicit process group, got None. "
            "Pass group=torch.distributed.group.WORLD for all ranks."
        )
    # Negative for a process outside the group.
    rank = dist.get_rank(group)
    if rank < 0:
        raise UsageError(
            f"expected a group that contains this process, got a group without global rank "
            f"{dist.get_rank()}. Pass a group that contains it."
        )
    return dist.get_world_size(group), rank


def reduce_scatter_sum(
    output: Tensor, flat: Tensor, *, group: dist.ProcessGroup, async_op: bool = False
) -> dist.Work | None:
    """Sum `flat` over the ranks and write this rank's shard of the sum to `output`.

    Args:
        output: 1D, `len(flat) / group size` elements; may be this rank's shard inside `flat`.
        flat: 1D. If it contains `output`, its other parts are undefined afterwards.
        group: The shard group, in shard order.
        async_op: True to return before completion.
    """
    return _reduce_scatter(output, flat, op=dist.ReduceOp.SUM, group=group, async_op=async_op)


def reduce_scatter_uneven_sum(
    output: Tensor,
    flat: Tensor,
    *,
    sizes: Sequence[int],
    group: dist.ProcessGroup,
    async_op: bool = False,
) -> dist.Work | None:
    """Sum `flat` over the ranks into shards of different lengths; see `reduce_scatter_sum`.

    Args:
        output: 1D, as long as this rank's shard; may be this rank's shard inside `flat`.
        flat: 1D.
        sizes: Length of each rank's shard; may be 0.
        group: The shard group, in shard order.
        async_op: True to return before completion.
    """
    # Views into `flat`, 1D, in rank order.
    parts = list(flat.split(list(sizes)))
    return dist.reduce_scatter(output, parts, op=dist.ReduceOp.SUM, group=group, async_op=async_op)


def all_gather(
    output: Tensor, shard: Tensor, *, group: dist.ProcessGroup, async_op: bool = False
) -> dist.Work | None:
    """Fill `output` with the ranks' shards in rank order.

    Args:
        output: 1D, `group size` times as long as `shard`.
        shard: 1D; may be this rank's shard inside `output`.
        group: The shard group, in shard order.
        async_op: True to return before completion.
    """
    return _all_gather(_movable(output), _movable(shard), group=group, async_op=async_op)


def all_gather_uneven(
    output: Tensor,
    shard: Tensor,
    *,
    sizes: Sequence[int],
    group: dist.ProcessGroup,
    async_op: bool = False,
) -> dist.Work | None:
    """Gather shards of different lengths into `output`, in rank order.

    Args:
        output: 1D, as long as all shards together.
        shard: 1D; may be this rank's shard inside `output`.
        sizes: Length of each rank's shard; may be 0.
        group: The shard group, in shard order.
        async_op: True to return before completion.
    """
    rank_count = len(sizes)
    # An all-to-all in which each rank sends its shard to all, because gloo only gathers equal
    # lengths. The input holds a copy of the shard for each rank, about as much as `output`.
    return dist.all_to_all_single(
        _movable(output),
        _movable(shard).repeat(rank_count),
        output_split_sizes=list(sizes),
        input_split_sizes=[shard.numel()] * rank_count,
        group=group,
        async_op=async_op,
    )


def reduce_to_owner_sum(
    flat: Tensor, *, owner: int, group: dist.ProcessGroup, async_op: bool = False
) -> dist.Work | None:
    """Replace `flat` by its sum over the ranks on the owner; undefined on other ranks.

    Args:
        flat: 1D, elements that all belong to the owner.
        owner: The owner's group rank.
        group: The ranks to sum over.
        async_op: True to return before completion.
    """
    return dist.reduce(flat, group_dst=owner, op=dist.ReduceOp.SUM, group=group, async_op=async_op)


def broadcast_from_owner(
    output: Tensor, part: Tensor, *, owner: int, group: dist.ProcessGroup, async_op: bool = False
) -> dist.Work | None:
    """Fill `output` on every rank with the owner's values.

    Args:
        output: 1D.
        part: 1D. On the owner as long as `output`, possibly the same memory; empty elsewhere.
        owner: The owner's group rank.
        group: The owner and the receiving ranks.
        async_op: True to return before completion.
    """
    # dist.broadcast works in place, so the owner's values must be in `output` first.
    if part.numel() and part.data_ptr() != output.data_ptr():
        output.copy_(part)
    return dist.broadcast(_movable(output), group_src=owner, group=group, async_op=async_op)


def all_reduce_sum(
    flat: Tensor, *, group: dist.ProcessGroup, async_op: bool = False
) -> dist.Work | None:
    """Replace `flat` (any shape) by its sum over the ranks, on every rank."""
    return dist.all_reduce(flat, op=dist.ReduceOp.SUM, group=group, async_op=async_op)


def all_reduce_max(flat: Tensor, *, group: dist.ProcessGroup) -> None:
    """Replace `flat` (any shape, no NaN) by its maximum over the ranks, on every rank."""
    dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=group)


def _movable(tensor: Tensor) -> Tensor:
    """Return the tensor, or its bytes if it is an 8-bit float; see [Note: one byte an element]."""
    is_byte = tensor.is_floating_point() and tensor.element_size() == 1
    return tensor.view(torch.uint8) if is_byte else tensor


# Small tensors travel together; for a larger tensor the copy costs more than a collective.
_COALESCED_BYTES_MAX = 1 << 20


@torch.no_grad()
def broadcast_from_first(tensors: Iterable[Tensor], *, group: dist.ProcessGroup) -> None:
    """Overwrite tensors with the values on group rank 0. Shapes and strides are arbitrary.

    Small tensors that share dtype and device share a collective.
    """
    # A model has many small tensors, and a collective costs more than a copy.
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_contiguous() and tensor.nbytes > _COALESCED_BYTES_MAX:
            dist.broadcast(_movable(tensor.detach()), group=group, group_src=0)
        elif tensor.numel():
            alike.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for members in alike.values():
        # 1D, all members concatenated, in logical order whatever their strides.
        flat = torch.cat([member.reshape(-1) for member in members])
        dist.broadcast(_movable(flat), group=group, group_src=0)
        parts = flat.split([member.numel() for member in members])
        for member, part in zip(members, parts, strict=True):
            member.copy_(part.view(member.shape))
