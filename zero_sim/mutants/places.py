"""Faults of who holds what: parts of a model, experts, and their groups."""

from __future__ import annotations

import torch

from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant
from zero_sim.targets import own
from zero_sim.zero.groups import KindGroups
from zero_sim.zero.optimizer import DistributedOptimizer
from zero_sim.zero.unit import Unit


@mutant("G07", "GROUP", "DR", seen_in="class GROUP", core=True)
def nothing_summed_without_shards(patch: Patches) -> None:
    """Where nothing is sharded, gradients are not summed over ranks."""

    @patch(Unit, "_sum_replicas")
    def wrong(right, self, *, async_op):
        return None if self.group is None else right(self, async_op=async_op)


@mutant("G08", "GROUP", "ME", seen_in="Megatron-LM#6080")
def experts_sharded_over_all(patch: Patches) -> None:
    """Experts are sharded over all ranks, though each rank holds only some of them."""

    @patch(own, "build_expert_groups")
    def wrong(right, group, *, redundancy, **others):
        if redundancy > 1:
            return right(group, redundancy=redundancy, **others)
        return KindGroups(group=group, shard_group=group)


@mutant("G09", "GROUP", "", seen_in="class GROUP", kill="contract")
def parts_meet_at_other_places(patch: Patches) -> None:
    """The ranks that put the norms of a model's parts together are not at one place in them."""

    @patch(own, "build_model_parallel_group")
    def wrong(right, places):
        first = [ranks[0] for ranks in places]
        rest = [ranks[1:] for ranks in places]
        turned = [*rest[1:], *rest[:1]]
        return right([(one, *others) for one, others in zip(first, turned, strict=True)])


@mutant("Z05", "ALIAS", "", seen_in="silent data corruption")
def one_bit_on_one_rank(patch: Patches) -> None:
    """After each step the last rank flips the lowest bit of one element of a working param."""

    @patch(DistributedOptimizer, "step")
    def wrong(right, self):
        result = right(self)
        data = self.ddp.buffers[-1].param_data
        if data is not None and self.ddp.rank == self.ddp.world_size - 1:
            self.ddp.finish_param_gather()
            data.view(torch.uint8)[0] ^= 1
        return result
