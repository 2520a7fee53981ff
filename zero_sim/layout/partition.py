"""Partition rules: how a unit is cut into shards.

    padded     padding at the end makes shards even; padding has no owner
    uneven     no padding; the first shards take an extra element each, for the remainder
    rows       a unit is a single param, padded so that no row of dim 0 spans two shards
    one-owner  no padding; a unit has a single owner, assigned round-robin

Shards are contiguous and in order, so each is a slice of flat memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PartitionRule = Literal["padded", "uneven", "rows", "one-owner"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """A unit's shards, contiguous and possibly empty.

    Source: even shards: ZeRO (arXiv 1910.02054), section 5. Uneven: DeepSpeed, stages 1 and 2.
    One owner: ZeRO's figure of a layer's life, and torch's ZeroRedundancyOptimizer. Rows: FSDP2.
    """

    numel: int
    """Number of elements, padding included."""
    shard_count: int
    owner: int | None = None
    """Shard that takes all elements; None to spread them as evenly as possible."""

    @property
    def is_even(self) -> bool:
        """True if all shards have the same length."""
        if self.owner is not None:
            # The owner has all elements and the other shards none.
            return self.shard_count == 1 or self.numel == 0
        return self.numel % self.shard_count == 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements in each shard."""
        return tuple(self.stop(shard) - self.start(shard) for shard in range(self.shard_count))

    def start(self, shard: int) -> int:
        """Return the first element of a shard, counted from the start of the unit."""
        if self.owner is not None:
            # Shards after the owner start at the end, so every shard but the owner is empty.
            return self.numel if shard > self.owner else 0
        # The first `longer_count` shards have an extra element.
        shortest, longer_count = divmod(self.numel, self.shard_count)
        return shard * shortest + min(shard, longer_count)

    def stop(self, shard: int) -> int:
        """Return the end of a shard: its last element + 1, counted from the start of the unit."""
        return self.start(shard + 1)

    def shard_of(self, offset: int) -> int:
        """Return the shard that contains an element, counted from the start of the unit."""
        if self.owner is not None:
            return self.owner
        shortest, longer_count = divmod(self.numel, self.shard_count)
        longer_elems = longer_count * (shortest + 1)
        # Before `longer_elems` shards have length shortest + 1, after it `shortest`. There
        # `shortest` is not 0, or all elements would be in the longer shards.
        if offset < longer_elems:
            return offset // (shortest + 1)
        return longer_count + (offset - longer_elems) // shortest
