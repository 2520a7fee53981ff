"""Masters: the fp32 values of what a rank owns, which its optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zero_sim.layout import Fragment, Span
from zero_sim.zero.buffer import Buffer
from zero_sim.zero.data_parallel import DistributedDataParallel


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Master:
    """One owned fragment and the fp32 leaf that the inner optimizer steps."""

    buffer_index: int
    buffer: Buffer
    param: nn.Parameter
    fragment: Fragment
    leaf: nn.Parameter  # 1D fp32, a view of the bucket's master shard


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OwnedFragment:
    """One fragment that this rank owns, with all its state: what a judge compares.

    The tensors are the engine's own memory: valid until the next call into it, and read only.
    """

    param: str
    """Name of the param."""
    buffer: int
    """Index into `ddp.buffers`."""
    bucket: int
    shard: int
    in_param: Span
    in_buffer: Span
    grad: Tensor  # 1D, in the gradient's dtype
    """The gradient as reduced, before any division after the sum; until `zero_grad`."""
    master: Tensor  # 1D fp32
    state: Mapping[str, Tensor]
    """The optimizer's own state, under its names; empty before the first step. A 0D tensor is the
    whole param's, and equal on all owners; any other has the shape of `master`."""


def build_masters(
    ddp: DistributedDataParallel, *, device: torch.device
) -> tuple[dict[tuple[int, int], Tensor], tuple[Master, ...]]:
    """Allocate one flat fp32 shard a bucket and cut it into one leaf an owned fragment."""
    shards: dict[tuple[int, int], Tensor] = {}
    masters: list[Master] = []
    for index, buffer in enumerate(ddp.buffers):
        for param, memory in buffer.memory.items():
            fragment = memory.fragment
            if fragment is None:
                continue
            key = (index, fragment.bucket)
            if key not in shards:
                span = buffer.plan.buckets[fragment.bucket].shard_span(fragment.shard)
                shards[key] = torch.zeros(span.numel, dtype=torch.float32, device=device)
            place = fragment.in_shard
            view = shards[key].narrow(0, place.start, place.numel)
            view.copy_(buffer.get_param_shard(param))
            leaf = nn.Parameter(view, requires_grad=False)
            masters.append(
                Master(buffer_index=index, buffer=buffer, param=param, fragment=fragment, leaf=leaf)
            )
    return shards, tuple(masters)
