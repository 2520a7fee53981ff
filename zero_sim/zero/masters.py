"""Masters: fp32 values of a rank's fragments, stepped by its optimizer."""

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
    """An owned fragment and its fp32 leaf, which is a param of the inner optimizer."""

    buffer_index: int
    buffer: Buffer
    param: nn.Parameter
    fragment: Fragment
    leaf: nn.Parameter  # 1D fp32, a view of the bucket's master shard


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OwnedFragment:
    """A fragment that this rank owns, with all its state, for the judge to compare.

    The tensors are the engine's own memory. Treat them as read only; they are valid until the next
    call into the engine.
    """

    param: str
    buffer: int
    """Index into `ddp.buffers`."""
    bucket: int
    shard: int
    in_param: Span
    in_buffer: Span
    grad: Tensor  # 1D, gradient dtype
    """The reduced gradient, before any division after the sum; valid until `zero_grad`."""
    master: Tensor  # 1D fp32
    state: Mapping[str, Tensor]
    """The optimizer's state under its own names; empty before the first step. A 0D tensor belongs
    to the whole param and is equal on all owners. Other tensors have the master's shape."""


def build_masters(
    ddp: DistributedDataParallel, *, device: torch.device
) -> tuple[dict[tuple[int, int], Tensor], tuple[Master, ...]]:
    """Allocate a flat fp32 shard for each bucket, and a leaf view for each owned fragment."""
    shards: dict[tuple[int, int], Tensor] = {}
    masters: list[Master] = []
    for index, buffer in enumerate(ddp.buffers):
        for param, memory in buffer.memory.items():
            fragment = memory.fragment
            if fragment is None:
                continue
            key = (index, fragment.bucket)
            # Zeros, because the shard contains padding, which must not be garbage.
            if key not in shards:
                span = buffer.plan.buckets[fragment.bucket].shard_span(fragment.shard)
                shards[key] = torch.zeros(span.numel, dtype=torch.float32, device=device)
            # Offsets into the shard, not into the bucket.
            place = fragment.in_shard
            view = shards[key].narrow(0, place.start, place.numel)
            # [fragment elements]: 16-bit values widen exactly; fp8 values arrive dequantized.
            view.copy_(buffer.get_param_shard(param))
            # The leaf is a view of the shard, so the optimizer steps the shard in place.
            leaf = nn.Parameter(view, requires_grad=False)
            masters.append(
                Master(buffer_index=index, buffer=buffer, param=param, fragment=fragment, leaf=leaf)
            )
    return shards, tuple(masters)
