"""The partition of a unit: which rank owns which elements of it, as data.

    padded     even shards, after padding that belongs to nobody
    uneven     no padding: where the shard count leaves a remainder the first shards hold one more
    rows       one param a unit, padded to whole rows: no row of dim 0 lies in two shards
    one-owner  no padding, and one owner for all of a unit; units are dealt out in turn

All are runs of a unit in the order of its shards, so that each shard is one slice of flat memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PartitionRule = Literal["padded", "uneven", "rows", "one-owner"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """The shards of one unit, a run of its elements each; a shard may be empty.

    Source: even shards are those of ZeRO (arXiv 1910.02054), section 5; uneven ones those of
    DeepSpeed's stages 1 and 2; whole units of one owner those of its figure of a layer's life, and
    of torch's ZeroRedundancyOptimizer; rows those of FSDP2.
    """

    numel: int
    """Elements of the unit, with its padding."""
    shard_count: int
    owner: int | None = None
    """The shard that has all of them; None where they are spread as evenly as they can be."""

    @property
    def is_even(self) -> bool:
        """Whether all shards are equally long."""
        if self.owner is not None:
            return self.shard_count == 1 or self.numel == 0
        return self.numel % self.shard_count == 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of each shard."""
        return tuple(self.stop(shard) - self.start(shard) for shard in range(self.shard_count))

    def start(self, shard: int) -> int:
        """Return the first element of a shard, counted from the start of the unit."""
        if self.owner is not None:
            return self.numel if shard > self.owner else 0
        shortest, longer_count = divmod(self.numel, self.shard_count)
        return shard * shortest + min(shard, longer_count)

    def stop(self, shard: int) -> int:
        """Return the element behind the last one of a shard."""
        return self.start(shard + 1)

    def shard_of(self, offset: int) -> int:
        """Return the shard that holds an element, counted from the start of the unit."""
        if self.owner is not None:
            return self.owner
        shortest, longer_count = divmod(self.numel, self.shard_count)
        longer_elems = longer_count * (shortest + 1)
        # Floor: the shard that holds it. Behind the longer shards a shard has at least one element,
        # or there would be no element behind them.
        if offset < longer_elems:
            return offset // (shortest + 1)
        return longer_count + (offset - longer_elems) // shortest
