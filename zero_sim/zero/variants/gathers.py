"""Alternative gathers: in chunks, as in DeepSpeed's stages 1 and 2, or also after the step."""

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
    """A unit whose params are gathered in chunks, so a call needs only a chunk of extra memory."""

    chunk_elems: int
    """Maximum number of elements per call, over all ranks. Each rank sends at least 1."""

    def _gather_shards(self, *, async_op: bool) -> dist.Work | None:
        assert self.param_storage is not None
        # Chunks use the same memory in turn, so only one can be in flight.
        self._gather_chunks(self.param_storage.acquire())
        return None

    def _gather_chunks(self, whole: Tensor) -> None:
        """Gather chunk by chunk: the same span in every rank's shard at a time."""
        assert self.param_shard is not None
        assert self.group is not None
        sizes = self.plan.shard_sizes
        starts = [*accumulate(sizes, initial=0)]
        own = dist.get_rank(self.group)
        # Elements per rank and call.
        stretch = max(1, self.chunk_elems // len(sizes))
        for first in range(0, max(sizes), stretch):
            # Uneven shards end at different chunks, so shorter shards send fewer elements or none.
            parts = tuple(max(0, min(stretch, size - first)) for size in sizes)
            mine = self.param_shard.narrow(0, min(first, sizes[own]), parts[own])
            chunk = whole.new_empty(sum(parts))
            self.collect(chunk, mine, sizes=parts, async_op=False)
            # Shards lie one after another, so copy each rank's part into its shard.
            # Not strict, because `starts` also contains the end of the last shard.
            for start, part, got in zip(starts, parts, chunk.split(parts), strict=False):
                whole.narrow(0, start + min(first, whole.numel() - start), part).copy_(got)


def chunked_units(
    chunk_elems: int, *, config: ZeroConfig, unit: type[ChunkedUnit] = ChunkedUnit
) -> Callable[..., Unit]:
    """Return a factory of units that gather in chunks.

    Args:
        chunk_elems: See `ChunkedUnit`.
        config: The engine's config.
        unit: Unit class.

    Raises:
        UsageError: If the config does not allow chunks, or the length is invalid.
    """
    if type(chunk_elems) is not int or chunk_elems < 1:
        raise UsageError(
            f"expected chunk_elems to be an integer of at least 1, got {chunk_elems!r}."
        )
    if config.stage not in (1, 2):
        raise UsageError(
            f"expected stage 1 or 2 with chunk_elems, because these stages gather all params after "
            f"a step, got stage={config.stage}. Remove chunk_elems, or choose another stage."
        )
    if config.overlap_params:
        raise UsageError(
            "expected overlap_params=False with chunk_elems, because chunks use the same memory in "
            "turn, got True. Remove either."
        )
    if config.layout.partition == "one-owner":
        raise UsageError(
            "expected partition='padded', 'uneven' or 'rows' with chunk_elems, because every rank "
            "needs a shard, got 'one-owner'. Set bucket_elems for smaller units instead."
        )
    return partial(unit, chunk_elems=chunk_elems)


class GatheredAfterStep(OnUse):
    """Sharded params that are also gathered and resharded after the step.

    ZeRO's paper shows this gather in a figure, but no forward needs it.
    """

    def gather(self) -> None:
        """Gather and reshard each unit."""
        super().gather()
        # In turn, so that memory holds a single unsharded unit.
        for unit in (unit for buffer in self._gathered for unit in buffer.units):
            unit.gather()
            unit.reshard()
