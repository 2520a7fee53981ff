"""Shard group and replica group of each rank with redundancy."""

from __future__ import annotations

from inspect import signature

import pytest
import torch.distributed as dist

from zero_sim.errors import LayoutError
from zero_sim.zero import build_redundancy_groups

GLOBAL_RANKS = dist.get_process_group_ranks


def members(group, redundancy):
    """Return global ranks of this rank's shard group and replica group."""
    groups = build_redundancy_groups(group, redundancy=redundancy)
    return GLOBAL_RANKS(groups.shard_group), GLOBAL_RANKS(groups.replica_group)


class TestBuildRedundancyGroups:
    """Consecutive ranks form shard groups; equal group ranks form replica groups."""

    def test_cuts_the_world_into_shard_groups(self, run_ranks):
        results, _ = run_ranks(6, lambda rank: members(dist.group.WORLD, 2))
        blocks = [[0, 1, 2]] * 3 + [[3, 4, 5]] * 3
        replicas = [[0, 3], [1, 4], [2, 5]] * 2
        assert results == list(zip(blocks, replicas, strict=True))

    def test_maximum_redundancy_gives_single_rank_shard_groups(self, run_ranks):
        """Nothing is sharded, and all ranks are replicas."""
        results, _ = run_ranks(3, lambda rank: members(dist.group.WORLD, 3))
        assert results == [([rank], [0, 1, 2]) for rank in range(3)]

    def test_one_replica_needs_no_new_group(self, lone_group):
        groups = build_redundancy_groups(lone_group, redundancy=1)
        assert (groups.shard_group, groups.replica_group) == (lone_group, None)

    def test_cuts_a_subgroup(self, run_ranks):
        """Ranks outside the group do not take part, twice in a row."""

        def program(rank):
            group = dist.new_group([1, 2, 4, 5])
            if rank in (1, 2, 4, 5):
                members(group, 2)
                return members(group, 2)
            return None

        results, _ = run_ranks(6, program)
        in_blocks = [([1, 2], [1, 4]), ([1, 2], [2, 5]), ([4, 5], [1, 4]), ([4, 5], [2, 5])]
        assert results == [None, *in_blocks[:2], None, *in_blocks[2:]]

    @pytest.mark.skipif(
        "sort_ranks" not in signature(dist.new_group).parameters, reason="all groups are sorted"
    )
    def test_follows_the_order_of_the_group(self, run_ranks):
        """A group with descending ranks is cut in its own order."""

        def program(rank):
            group = dist.new_group([3, 2, 1, 0], sort_ranks=False)
            return members(group, 2)

        results, _ = run_ranks(4, program)
        assert results == [([1, 0], [2, 0]), ([1, 0], [3, 1]), ([3, 2], [2, 0]), ([3, 2], [3, 1])]

    @pytest.mark.parametrize("redundancy", [0, 4, 5, 12])
    def test_refuses_uneven_shard_groups(self, run_ranks, redundancy):

        def program(rank):
            message = rf"redundancy={redundancy} for 6 ranks\. Use one of 1, 2, 3, 6"
            with pytest.raises(LayoutError, match=message):
                build_redundancy_groups(dist.group.WORLD, redundancy=redundancy)

        run_ranks(6, program)
