"""Groups of ranks that hold different experts, or different parts of one model.

With ep-fold expert parallelism, the ranks at group ranks e, e + ep, e + 2 ep, ... hold the experts
of index e. For their experts these ranks form the same groups as all ranks do for dense params,
replicas included.
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

    Every rank of `group` must call it, at the same point among its `new_group` calls.

    Args:
        group: The ranks that train together, in the order of the experts' distribution.
        expert_parallel: Number of shares of the experts, ep. A rank's share is its group rank
            modulo ep.
        redundancy: Replicas of the experts' state.

    Returns:
        The groups of the ranks with the same experts; the groups of all ranks if ep = 1.

    Raises:
        LayoutError: If shares or shard groups would differ in their number of ranks.
        UsageError: If `group` is None or does not contain this process.
    """
    world_size, rank = size_and_rank(group)
    if expert_parallel < 1 or world_size % expert_parallel:
        raise LayoutError(
            f"expected expert_parallel to divide the number of ranks, because every share of the "
            f"experts is on equally many, got {expert_parallel} for {world_size} ranks. Use 1."
        )
    own = group
    if expert_parallel > 1:
        # new_group takes world ranks, and `group` may be a part of the world.
        ranks = dist.get_process_group_ranks(group)
        shares = [ranks[index::expert_parallel] for index in range(expert_parallel)]
        own = new_groups(shares, own=rank % expert_parallel)
    # Shard and replica groups lie inside the ranks with the same experts.
    return build_redundancy_groups(own, redundancy=redundancy)


def build_model_parallel_group(places: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """Create the model-parallel groups: ranks at one index in the dp-cp groups of all model parts.

    Every rank of the world must call it, at the same point among its `new_group` calls.

    Args:
        places: World ranks, one of each part, index by index; every rank once.

    Returns:
        The group of this rank.

    Raises:
        UsageError: If `places` does not contain this process.
    """
    rank = dist.get_rank()
    # Each rank is in exactly one of them.
    own = next((index for index, ranks in enumerate(places) if rank in ranks), None)
    if own is None:
        raise UsageError(f"expected places that contain rank {rank}, got {list(places)}.")
    return new_groups(places, own=own)
