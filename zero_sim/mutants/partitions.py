"""Faults of partitions by rows and by owners, and of sums to all ranks."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist

from zero_sim.layout import planner
from zero_sim.layout.partition import Partition
from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant
from zero_sim.zero import unit as units
from zero_sim.zero.unit import Unit
from zero_sim.zero.variants.gathers import GatheredAfterStep


@mutant("Q01", "LAYOUT", "NP", seen_in="class LAYOUT", kill="memory")
def rows_are_cut(patch: Patches) -> None:
    """A param split by rows is padded to even shards alone, so that a row lies in two of them."""

    @patch(planner, "_row_elems")
    def wrong(right, specs):
        return 1


@mutant("Q02", "LAYOUT", "NP", seen_in="class LAYOUT", kill="memory")
def padded_by_its_first_dim(patch: Patches) -> None:
    """Shards are multiples of the number of rows, not of the length of one."""

    @patch(planner, "_row_elems")
    def wrong(right, specs):
        shapes = [spec.shape for spec in specs if spec.numel and spec.shape]
        return max((shape[0] for shape in shapes), default=1)


@mutant("Q03", "LAYOUT", "NP", seen_in="class LAYOUT", kill="memory")
def owner_by_place_in_the_model(patch: Patches) -> None:
    """The first rank owns as many units as there are ranks, and so on, in place of turns."""

    @patch(planner, "_plan_bucket")
    def wrong(right, index, specs, *, start, policy, dtype):
        bucket = right(index, specs, start=start, policy=policy, dtype=dtype)
        if bucket.partition.owner is None:
            return bucket
        owner = index // bucket.shard_count % bucket.shard_count
        return replace(bucket, partition=replace(bucket.partition, owner=owner))


@mutant("Q04", "GROUP", "NP", seen_in="class GROUP", core=True)
def broadcast_from_a_neighbour(patch: Patches) -> None:
    """Params come from the rank behind their owner, which has old ones."""

    @patch(units, "broadcast_from_owner")
    def wrong(right, output, part, *, owner, group, async_op=False):
        source = (owner + 1) % dist.get_world_size(group)
        return right(output, part, owner=source, group=group, async_op=async_op)


@mutant("Q05", "GROUP", "NP", seen_in="class GROUP", core=True)
def reduced_to_a_neighbour(patch: Patches) -> None:
    """The sum of a unit arrives at the rank behind its owner."""

    @patch(units, "reduce_to_owner_sum")
    def wrong(right, flat, *, owner, group, async_op=False):
        target = (owner + 1) % dist.get_world_size(group)
        return right(flat, owner=target, group=group, async_op=async_op)


@mutant("Q06", "LAYOUT", "NP", seen_in="class LAYOUT", kill="memory")
def owner_lacks_the_last(patch: Patches) -> None:
    """Of a unit with one owner the last element is counted to the rank behind it."""

    @patch(Partition, "start")
    def wrong(right, self, shard):
        start = right(self, shard)
        is_next = self.owner is not None and shard == self.owner + 1 < self.shard_count
        return start - 1 if is_next else start


@mutant("Q12", "VOLUME", "NP", seen_in="class VOLUME", kill="volume")
def reduced_to_owners_all_the_same(patch: Patches) -> None:
    """That gradients are to be summed to all ranks is not heard of."""

    @patch(Unit, "_sum_shards")
    def wrong(right, self, *, async_op):
        self.sum_all = None
        return right(self, async_op=async_op)


@mutant("Q13", "GROUP", "K", seen_in="class GROUP")
def summed_to_all_ranks_twice(patch: Patches) -> None:
    """With copies, a sum to all ranks of a block is summed over its shard's copies twice."""

    @patch(Unit, "_sum_replicas")
    def wrong(right, self, *, async_op):
        if self.sum_all is not None and self.replica_group is not None:
            right(self, async_op=False)
        return right(self, async_op=async_op)


@mutant("Q14", "ASYNC", "Z3", seen_in="class ASYNC", kill="memory")
def stays_whole_after_the_step(patch: Patches) -> None:
    """What is gathered once more after the step is not freed."""

    @patch(GatheredAfterStep, "gather")
    def wrong(right, self):
        self.free_all()
        for buffer in self._gathered:
            for unit in buffer.units:
                unit.gather()
