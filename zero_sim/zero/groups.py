"""Shard groups, and the replica groups that sum over them.

With redundancy K, N ranks are split into K shard groups of N / K consecutive ranks. Each shard
group shards the whole state: its ranks reduce-scatter and gather among themselves. The K ranks with
the same shard form a replica group, which adds the partial sums. For example, with K = 2 and 6
ranks: shard groups 0 1 2 and 3 4 5, replica groups 0 3, 1 4 and 2 5.

Some kinds of params, such as experts, may be on some ranks only. These ranks are then split into
shard groups and replica groups in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch.distributed as dist
from torch import Tensor

from zero_sim.errors import LayoutError, UsageError
from zero_sim.zero.collectives import size_and_rank
from zero_sim.zero.config import ZeroConfig

# A rank's group rank decides its shard, so groups must keep the given order. torch 2.11 sorts all
# groups and has no such option.
_KEEP_RANK_ORDER: dict[str, Any] = (
    {"sort_ranks": False} if "sort_ranks" in signature(dist.new_group).parameters else {}
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KindGroups:
    """The groups that sum, shard and replicate one kind of params."""

    group: dist.ProcessGroup
    """All ranks that hold these params."""
    shard_group: dist.ProcessGroup | None = None
    """This rank's shard group, which is `group` without redundancy. None at stage 0."""
    replica_group: dist.ProcessGroup | None = None
    """The ranks with this rank's shard; None without replicas."""


KindOf = Callable[[str, Tensor], str]
"""Returns the kind for the name and tensor of a param (trained or not) or a module buffer. Params
of different kinds share no flat buffer."""


def all_dense(name: str, tensor: Tensor) -> str:
    """Return `dense`, the kind of all params in a model without experts."""
    return "dense"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Holders:
    """The ranks that hold the params of each kind."""

    dense: KindGroups
    """Groups of the params on all ranks."""
    parts: Mapping[str, KindGroups]
    """Groups of params on some ranks only, such as experts, by kind."""
    kind_of: KindOf
    kinds: Mapping[str, str]
    """Kind of each trained param, by name."""

    def groups_of(self, kind: str) -> KindGroups:
        """Return the groups that sum, shard and replicate a kind of params."""
        return self.parts.get(kind, self.dense)

    def are_all(self, kind: str) -> bool:
        """Return True if all ranks hold the kind's params."""
        return kind not in self.parts

    def owners_of(self, kind: str) -> dist.ProcessGroup | None:
        """Return the shard group of a kind; None if each rank owns everything."""
        return self.groups_of(kind).shard_group

    def is_first_replica(self, kind: str) -> bool:
        """Return True if this rank holds the first replica of its shard.

        The first replica contains each element exactly once: on the kind's first rank at stage 0,
        else on the ranks in its first shard group.
        """
        replicas = self.groups_of(kind).replica_group
        return replicas is None or replicas.rank() == 0


def build_redundancy_groups(group: dist.ProcessGroup, *, redundancy: int) -> KindGroups:
    """Split a group into shard groups and replica groups.

    Every rank in `group` must call it, at the same point among its `new_group` calls.

    Args:
        group: The ranks that train together, in the order to split them.
        redundancy: Number of shard groups, K.

    Returns:
        The group with this rank's shard group and replica group: `group` itself and None if K = 1.

    Raises:
        LayoutError: If K does not divide the number of ranks.
        UsageError: If `group` is None or does not contain this process.
    """
    world_size, rank = size_and_rank(group)
    shard_count = split_ranks(world_size, redundancy=redundancy)
    if redundancy == 1:
        return KindGroups(group=group, shard_group=group)
    # new_group takes world ranks, and `group` may be a part of the world.
    ranks = dist.get_process_group_ranks(group)
    blocks = [ranks[start : start + shard_count] for start in range(0, world_size, shard_count)]
    replicas = [ranks[shard::shard_count] for shard in range(shard_count)]
    return KindGroups(
        group=group,
        # Both calls create all groups on every rank, in the same order.
        shard_group=new_groups(blocks, own=rank // shard_count),
        replica_group=new_groups(replicas, own=rank % shard_count),
    )


def split_ranks(world_size: int, *, redundancy: int) -> int:
    """Return the number of ranks per shard group, N / K.

    Raises:
        LayoutError: If `redundancy` does not divide `world_size`.
    """
    if redundancy < 1 or world_size % redundancy:
        divisors = [count for count in range(1, world_size + 1) if world_size % count == 0]
        raise LayoutError(
            f"expected redundancy to divide the number of ranks, because all shard groups are "
            f"equally large, got redundancy={redundancy} for {world_size} ranks. "
            f"Use one of {', '.join(map(str, divisors))}."
        )
    return world_size // redundancy


def new_groups(members: Sequence[Sequence[int]], *, own: int) -> dist.ProcessGroup:
    """Create all groups, in the same order on all ranks, and return this rank's group.

    Args:
        members: World ranks of each group; together all ranks that call this function.
        own: Index of this rank's group.
    """
    # If some world ranks do not call this function, new_group must not wait for them.
    is_part = sum(map(len, members)) < dist.get_world_size()
    groups = [
        dist.new_group(list(ranks), use_local_synchronization=is_part, **_KEEP_RANK_ORDER)
        for ranks in members
    ]
    group = groups[own]
    assert isinstance(group, dist.ProcessGroup)
    return group


def check_kind_groups(
    given: Mapping[str, KindGroups], *, within: dist.ProcessGroup, config: ZeroConfig
) -> dict[str, KindGroups]:
    """Check the groups of kinds that only some ranks hold, and fill in implied groups.

    Args:
        given: Groups by kind.
        within: All ranks that train together.
        config: Sharding and redundancy.

    Raises:
        UsageError: If a group has the wrong ranks, or is missing.
    """
    for kind, groups in given.items():
        holders = set(dist.get_process_group_ranks(groups.group))
        if not holders <= set(dist.get_process_group_ranks(within)):
            raise UsageError(
                f"expected the ranks with {kind!r} params among those that train together, "
                f"got {sorted(holders)}. Use build_expert_groups(group, ...)."
            )
    return {kind: check_groups(groups, config=config) for kind, groups in given.items()}


def check_groups(given: KindGroups, *, config: ZeroConfig) -> KindGroups:
    """Check the ranks of the groups, and fill in implied groups.

    Args:
        given: The groups. Implied groups may be None.
        config: Sharding and redundancy.

    Raises:
        UsageError: If a group has the wrong ranks, or is missing.
    """
    group, shard_group, replica_group = given.group, given.shard_group, given.replica_group
    redundancy = config.redundancy
    size, rank = size_and_rank(group)
    shard_count = split_ranks(size, redundancy=redundancy)
    if not config.sharding.state:
        # At stage 0 every rank is a shard group of its own, and all ranks are replicas.
        return KindGroups(group=group, replica_group=group)
    if redundancy == 1 and replica_group is None and shard_group is None:
        return KindGroups(group=group, shard_group=group)
    if redundancy > 1 and (shard_group is None or replica_group is None):
        raise UsageError(
            f"expected shard_group and replica_group with redundancy={redundancy}, got None."
            f" Pass group=build_redundancy_groups(group, redundancy={redundancy})."
        )
    for name, subgroup, expected in (
        ("shard_group", shard_group, (shard_count, rank % shard_count)),
        ("replica_group", replica_group, (redundancy, rank // shard_count)),
    ):
        # A missing group follows from the others, see below.
        got = expected if subgroup is None else size_and_rank(subgroup)
        if got != expected:
            raise UsageError(
                f"expected {name} to have {expected[0]} ranks, with this one, rank {rank} "
                f"of {size}, at group rank {expected[1]}, got {got[0]} ranks and group rank "
                f"{got[1]}. Use build_redundancy_groups(group, redundancy={redundancy})."
            )
    return KindGroups(
        group=group,
        shard_group=shard_group or group,
        replica_group=replica_group if redundancy > 1 else None,
    )
