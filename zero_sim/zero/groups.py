"""The two groups of a rank where the optimizer state is kept in several copies.

With redundancy K, N ranks are cut into K blocks of N / K consecutive ranks. A block shards the
whole state: its ranks reduce-scatter and gather among themselves. The K ranks that hold the same
shard, one a block, then sum what their blocks reduced. With K = 2 and 6 ranks: blocks 0 1 2 and
3 4 5, and replicas 0 3, 1 4 and 2 5.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from zero_sim.errors import LayoutError
from zero_sim.zero.collectives import size_and_rank


def build_redundancy_groups(
    group: dist.ProcessGroup, *, redundancy: int
) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """Cut a group into blocks that shard and make the groups across them.

    Every rank of `group` must call it, at the same point among its other calls of `new_group`.

    Args:
        group: The ranks that train together, in the order in which blocks are cut from them.
        redundancy: Number of blocks, K.

    Returns:
        The block of this rank, and the ranks that hold its shard in all blocks; `group` itself and
        None where there is one block.

    Raises:
        LayoutError: If the blocks would not be equally large.
        UsageError: If `group` is None or does not hold this process.
    """
    world_size, rank = size_and_rank(group)
    shard_count = split_ranks(world_size, redundancy=redundancy)
    if redundancy == 1:
        return group, None
    # new_group counts ranks of the world, and `group` may be a part of it.
    ranks = dist.get_process_group_ranks(group)
    blocks = [ranks[start : start + shard_count] for start in range(0, world_size, shard_count)]
    replicas = [ranks[shard::shard_count] for shard in range(shard_count)]
    # Ranks outside `group` do not call this, so that they must not be waited for.
    is_part = world_size < dist.get_world_size(dist.group.WORLD)
    return (
        _new_groups(blocks, own=rank // shard_count, is_part=is_part),
        _new_groups(replicas, own=rank % shard_count, is_part=is_part),
    )


def split_ranks(world_size: int, *, redundancy: int) -> int:
    """Return how many ranks shard together, N / K.

    Raises:
        LayoutError: If `redundancy` does not divide `world_size`.
    """
    if redundancy < 1 or world_size % redundancy:
        divisors = [count for count in range(1, world_size + 1) if world_size % count == 0]
        raise LayoutError(
            f"Expected redundancy to divide the number of ranks, so that every block of ranks "
            f"shards alike, but got redundancy={redundancy} for {world_size} ranks. "
            f"Try one of {', '.join(map(str, divisors))}."
        )
    return world_size // redundancy


def _new_groups(members: Sequence[Sequence[int]], *, own: int, is_part: bool) -> dist.ProcessGroup:
    """Make all groups, in one order on all ranks, and return the one that this rank is in."""
    groups = [
        # sort_ranks=False: a rank's place in its block follows from its place in `group`.
        dist.new_group(list(ranks), use_local_synchronization=is_part, sort_ranks=False)
        for ranks in members
    ]
    group = groups[own]
    assert isinstance(group, dist.ProcessGroup)
    return group
