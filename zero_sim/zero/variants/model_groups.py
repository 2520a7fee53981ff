"""Groups of ranks that hold different experts, or different parts of one model.

Experts are held by some of the ranks only: with ep-fold expert parallelism by those at places e,
e + ep, e + 2 ep, ... for an expert-parallel index e. For their experts these ranks are what all
ranks are for dense params, copies of the state included.
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
    """Make the groups of this rank's experts.

    Every rank of `group` must call it, at the same point among its other calls of `new_group`.

    Args:
        group: The ranks that train together, in the order in which experts are dealt to them.
        expert_parallel: Number of shares of the experts, ep; a rank's is its place modulo this.
        redundancy: Copies of the experts' state.

    Returns:
        The groups of the ranks that hold the same experts; with one share those of all ranks.

    Raises:
        LayoutError: If the shares, or their blocks, would not be on equally many ranks.
        UsageError: If `group` is None or does not hold this process.
    """
    world_size, rank = size_and_rank(group)
    if expert_parallel < 1 or world_size % expert_parallel:
        raise LayoutError(
            f"expected expert_parallel to divide the number of ranks, so that every share of the "
            f"experts is on equally many, got {expert_parallel} for {world_size} ranks. Try 1."
        )
    own = group
    if expert_parallel > 1:
        ranks = dist.get_process_group_ranks(group)
        shares = [ranks[index::expert_parallel] for index in range(expert_parallel)]
        own = new_groups(shares, own=rank % expert_parallel)
    return build_redundancy_groups(own, redundancy=redundancy)


def build_model_parallel_group(places: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """Make the groups of ranks that are at one place in the groups of a model's parts.

    Every rank of the world must call it, at the same point among its other calls of `new_group`.

    Args:
        places: World ranks, one of each part, place by place; every rank once.

    Returns:
        The group of this rank.

    Raises:
        UsageError: If this process is at no place.
    """
    rank = dist.get_rank()
    own = next((index for index, ranks in enumerate(places) if rank in ranks), None)
    if own is None:
        raise UsageError(f"expected places that hold rank {rank}, got {list(places)}.")
    return new_groups(places, own=own)
