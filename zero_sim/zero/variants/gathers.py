"""Other gathers: in chunks, as DeepSpeed's stages 1 and 2, and once more after the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch.distributed as dist
from torch import Tensor

from zero_sim.errors import UsageError
from zero_sim.zero.config import ZeroConfig
from zero_sim.zero.gathers import OnUse
from zero_sim.zero.unit import Unit


@dataclass(kw_only=True, slots=True, eq=False)
class ChunkedUnit(Unit):
    """A unit whose whole params are gathered a chunk at a time, in memory as long as a chunk."""

    chunk_elems: int
    """Most elements that one call gathers, over all ranks, but one of each at least."""

    def _gather_shards(self, *, async_op: bool) -> dist.Work | None:
        assert self.param_storage is not None
        self._gather_chunks(self.param_storage.acquire())
        return None

    def _gather_chunks(self, whole: Tensor) -> None:
        """Gather a stretch of every rank's shard at a time."""
        assert self.param_shard is not None
        assert self.group is not None
        sizes = self.plan.shard_sizes
        starts = [*accumulate(sizes, initial=0)]
        own = dist.get_rank(self.group)
        stretch = max(1, self.chunk_elems // len(sizes))
        for first in range(0, max(sizes), stretch):
            parts = tuple(max(0, min(stretch, size - first)) for size in sizes)
            mine = self.param_shard.narrow(0, min(first, sizes[own]), parts[own])
            chunk = whole.new_empty(sum(parts))
            self.collect(chunk, mine, sizes=parts, async_op=False)
            for start, part, got in zip(starts, parts, chunk.split(parts), strict=False):
                whole.narrow(0, start + min(first, whole.numel() - start), part).copy_(got)


def chunked_units(
    chunk_elems: int, *, config: ZeroConfig, unit: type[ChunkedUnit] = ChunkedUnit
) -> Callable[..., Unit]:
    """Return a builder of units that gather in chunks.

    Args:
        chunk_elems: As in `ChunkedUnit`.
        config: Of the engine.
        unit: Class of the units.

    Raises:
        UsageError: If gathers in chunks do not go with the config, or have no such length.
    """
    if type(chunk_elems) is not int or chunk_elems < 1:
        raise UsageError(
            f"expected chunk_elems to be an integer of at least 1, got {chunk_elems!r}."
        )
    if config.stage not in (1, 2):
        raise UsageError(
            f"expected stage 1 or 2 with chunk_elems, where all params are gathered after a step, "
            f"got stage={config.stage}. Remove chunk_elems, or choose another stage."
        )
    if config.overlap_params:
        raise UsageError(
            "expected overlap_params=False with chunk_elems, as one chunk's memory serves all of "
            "them in turn, got True. Remove either."
        )
    if config.layout.partition == "one-owner":
        raise UsageError(
            "expected partition='padded', 'uneven' or 'rows' with chunk_elems, of which every rank "
            "has a stretch, got 'one-owner'. Set bucket_elems for smaller units."
        )
    return partial(unit, chunk_elems=chunk_elems)


class GatheredAfterStep(OnUse):
    """Sharded params that are gathered once after the step, too, and freed.

    The figure of ZeRO's paper has it so. No forward needs it, and it sends P more.
    """

    def gather(self) -> None:
        """Gather and free each unit."""
        super().gather()
        for unit in (unit for buffer in self._gathered for unit in buffer.units):
            unit.gather()
            unit.free_params()
