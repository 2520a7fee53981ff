"""Groups of ranks: shard groups, and replica groups with copies of a shard.

With redundancy K, N ranks are cut into K blocks of N / K consecutive ranks. A block shards the
whole state: its ranks reduce-scatter and gather among themselves. The K ranks that hold the same
shard, one a block, then sum what their blocks reduced. With K = 2 and 6 ranks: blocks 0 1 2 and
3 4 5, and replicas 0 3, 1 4 and 2 5.

Params of some kinds may be held by some of the ranks only. For these params they are what all ranks
are for dense ones, copies of the state included.
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

# A rank's place in its block follows from its place in `group`. In torch 2.11 all groups are
# sorted, and there is nothing to ask for.
_AS_THEY_STAND: dict[str, Any] = (
    {"sort_ranks": False} if "sort_ranks" in signature(dist.new_group).parameters else {}
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KindGroups:
    """The groups over which params of one kind are summed, sharded and held in copies."""

    group: dist.ProcessGroup
    """All ranks that hold them."""
    shard_group: dist.ProcessGroup | None = None
    """The ranks that hold a shard each; with one copy of the state it is `group`, and None where
    each of them holds all."""
    replica_group: dist.ProcessGroup | None = None
    """The ranks that hold the same shard; None with one copy of the state."""


KindOf = Callable[[str, Tensor], str]
"""Returns the kind of a param, trained or not, or of a module buffer, from its name and the tensor;
params of different kinds share no buffer."""


def all_dense(name: str, tensor: Tensor) -> str:
    """The kind of every param of a model without experts."""
    return "dense"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Holders:
    """The ranks that hold the params of each kind."""

    dense: KindGroups
    """Groups of params on all ranks."""
    parts: Mapping[str, KindGroups]
    """By kind: groups of params on some ranks only, such as experts."""
    kind_of: KindOf
    kinds: Mapping[str, str]
    """Kind of each trained param, by name."""

    def groups_of(self, kind: str) -> KindGroups:
        """Return the groups over which params of a kind are summed, sharded and held in copies."""
        return self.parts.get(kind, self.dense)

    def are_all(self, kind: str) -> bool:
        """True if all ranks hold the params of a kind."""
        return kind not in self.parts

    def owners_of(self, kind: str) -> dist.ProcessGroup | None:
        """Return the ranks that own a shard of a kind each; None where each of them owns all."""
        return self.groups_of(kind).shard_group

    def is_first_copy(self, kind: str) -> bool:
        """True if this rank holds the first copy of its shard of a kind.

        Every element is in the first copy once, on one rank. Where nothing is sharded that is the
        first rank of the kind's group; with redundancy, every rank of its first block.
        """
        replicas = self.groups_of(kind).replica_group
        return replicas is None or replicas.rank() == 0


def build_redundancy_groups(group: dist.ProcessGroup, *, redundancy: int) -> KindGroups:
    """Cut a group into blocks that shard and make the groups across them.

    Every rank of `group` must call it, at the same point among its other calls of `new_group`.

    Args:
        group: The ranks that train together, in the order in which blocks are cut from them.
        redundancy: Number of blocks, K.

    Returns:
        The group with the block of this rank, and the ranks that hold its shard in all blocks. With
        one block these are `group` itself and None.

    Raises:
        LayoutError: If the blocks would not be equally large.
        UsageError: If `group` is None or does not hold this process.
    """
    world_size, rank = size_and_rank(group)
    shard_count = split_ranks(world_size, redundancy=redundancy)
    if redundancy == 1:
        return KindGroups(group=group, shard_group=group)
    # new_group counts ranks of the world, and `group` may be a part of it.
    ranks = dist.get_process_group_ranks(group)
    blocks = [ranks[start : start + shard_count] for start in range(0, world_size, shard_count)]
    replicas = [ranks[shard::shard_count] for shard in range(shard_count)]
    return KindGroups(
        group=group,
        shard_group=new_groups(blocks, own=rank // shard_count),
        replica_group=new_groups(replicas, own=rank % shard_count),
    )


def split_ranks(world_size: int, *, redundancy: int) -> int:
    """Return how many ranks shard together, N / K.

    Raises:
        LayoutError: If `redundancy` does not divide `world_size`.
    """
    if redundancy < 1 or world_size % redundancy:
        divisors = [count for count in range(1, world_size + 1) if world_size % count == 0]
        raise LayoutError(
            f"expected redundancy to divide the number of ranks, so that every block of ranks "
            f"shards alike, got redundancy={redundancy} for {world_size} ranks. "
            f"Try one of {', '.join(map(str, divisors))}."
        )
    return world_size // redundancy


def new_groups(members: Sequence[Sequence[int]], *, own: int) -> dist.ProcessGroup:
    """Make all groups, in one order on all ranks, and return the one that this rank is in.

    Args:
        members: World ranks of each; together all ranks that call this.
        own: Index of this rank's group.
    """
    # Ranks outside all of them do not call this, so that they must not be waited for.
    is_part = sum(map(len, members)) < dist.get_world_size()
    groups = [
        dist.new_group(list(ranks), use_local_synchronization=is_part, **_AS_THEY_STAND)
        for ranks in members
    ]
    group = groups[own]
    assert isinstance(group, dist.ProcessGroup)
    return group


def check_kind_groups(
    given: Mapping[str, KindGroups], *, within: dist.ProcessGroup, config: ZeroConfig
) -> dict[str, KindGroups]:
    """Return the groups of each kind that not all ranks hold, with those left out filled in.

    Args:
        given: By kind.
        within: All ranks that train together.
        config: Says how they are to be cut.

    Raises:
        UsageError: If a group has other ranks in it, or is missing.
    """
    for kind, groups in given.items():
        holders = set(dist.get_process_group_ranks(groups.group))
        if not holders <= set(dist.get_process_group_ranks(within)):
            raise UsageError(
                f"expected the ranks that hold {kind!r} params among those that train "
                f"together, got {sorted(holders)}. Try build_expert_groups(group, ...)."
            )
    return {kind: check_groups(groups, config=config) for kind, groups in given.items()}


def check_groups(given: KindGroups, *, config: ZeroConfig) -> KindGroups:
    """Return the groups that shard and that hold copies, after a look at who is in them.

    Args:
        given: With those left out that follow from others.
        config: Says how ranks are to be cut.

    Raises:
        UsageError: If a group has other ranks in it, or is missing.
    """
    group, shard_group, replica_group = given.group, given.shard_group, given.replica_group
    redundancy = config.redundancy
    size, rank = size_and_rank(group)
    shard_count = split_ranks(size, redundancy=redundancy)
    if not config.sharding.state:
        # Every rank is a shard group of its own, and all hold the same shard.
        return KindGroups(group=group, replica_group=group)
    if redundancy == 1 and replica_group is None and shard_group is None:
        return KindGroups(group=group, shard_group=group)
    if redundancy > 1 and (shard_group is None or replica_group is None):
        raise UsageError(
            f"expected shard_group and replica_group with redundancy={redundancy}, got None."
            f" Try group=build_redundancy_groups(group, redundancy={redundancy})."
        )
    for name, subgroup, expected in (
        ("shard_group", shard_group, (shard_count, rank % shard_count)),
        ("replica_group", replica_group, (redundancy, rank // shard_count)),
    ):
        got = expected if subgroup is None else size_and_rank(subgroup)
        if got != expected:
            raise UsageError(
                f"expected {name} to have {expected[0]} ranks and this one, rank {rank} "
                f"of {size}, as its rank {expected[1]}, got {got[0]} ranks and "
                f"rank {got[1]}. Try build_redundancy_groups(group, redundancy={redundancy})."
            )
    return KindGroups(
        group=group,
        shard_group=shard_group or group,
        replica_group=replica_group if redundancy > 1 else None,
    )
