"""Groups for expert parallelism, and for a model that is split over ranks.

With ep-fold expert parallelism, group ranks e, e + ep, e + 2 ep, ... hold the experts with index e.
These ranks are split into shard groups and replica groups for their experts, as all ranks are for
dense params.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from zero_sim.errors import LayoutError, UsageError
from zero_sim.zero.collectives import size_and_rank
from zero_sim.zero.groups import KindGroups, build_redundancy_groups, new_groups


def build_expert_groups(
    group: dist.ProcessGroup,
    *,
    expert_parallel: int,
    redundancy: int = 1,
) -> KindGroups:
    """Create the groups of this rank's experts.

    Every rank in `group` must call it, at the same point among its `new_group` calls.

    Args:
        group: The ranks that train together.
        expert_parallel: Number of shares that experts are split into, ep. A rank holds the share
            with index group rank modulo ep.
        redundancy: Replicas of the experts' state.

    Returns:
        Groups of ranks with the same experts; groups of all ranks if ep = 1.

    Raises:
        LayoutError: If `expert_parallel` does not divide the number of ranks, or `redundancy` does
            not divide the number of ranks per share.
        UsageError: If `group` is None or does not contain this process.
    """
    world_size, rank = size_and_rank(group)
    if expert_parallel < 1 or world_size % expert_parallel:
        raise LayoutError(
            f"expected expert_parallel to divide the number of ranks, because each share of the "
            f"experts is on equally many, got {expert_parallel} for {world_size} ranks. Use 1."
        )
    own = group
    if expert_parallel > 1:
        # new_group takes world ranks, and `group` may be a part of the world.
        ranks = dist.get_process_group_ranks(group)
        shares = [ranks[index::expert_parallel] for index in range(expert_parallel)]
        own = new_groups(shares, own=rank % expert_parallel)
    # Only ranks with the same experts shard and replicate them.
    return build_redundancy_groups(own, redundancy=redundancy)


def build_model_parallel_group(places: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """Create the model-parallel groups, each with a rank from every model part.

    Every rank in the world must call it, at the same point among its `new_group` calls.

    Args:
        places: World ranks of each group: the ranks at the same index in all dp-cp groups. Every
            rank appears once.

    Returns:
        This rank's group.

    Raises:
        UsageError: If `places` does not contain this process.
    """
    rank = dist.get_rank()
    own = next((index for index, ranks in enumerate(places) if rank in ranks), None)
    if own is None:
        raise UsageError(f"expected places that contain rank {rank}, got {list(places)}.")
    return new_groups(places, own=own)
